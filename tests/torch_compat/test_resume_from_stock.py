"""Stock Lightning's checkpoints of every moment of an epoch are continued with the same batch as stock continues them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import warm
from torch_compat.checkpoint import stock_loops
from torch_compat.utilities.exceptions import MisconfigurationException

SCRIPT = """
import json, logging, sys, warnings
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, self.global_step))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class SaveInHooks(pl.Callback):
    def save(self, trainer, moment):
        trainer.save_checkpoint(f"{moment}.{trainer.current_epoch}.{trainer.global_step}.ckpt")

    def on_train_epoch_start(self, trainer, pl_module):
        self.save(trainer, "epoch_start")

    def on_train_batch_end(self, trainer, *args):
        self.save(trainer, "batch_end")

    def on_validation_end(self, trainer, pl_module):
        self.save(trainer, "validation_end")

    def on_train_epoch_end(self, trainer, pl_module):
        self.save(trainer, "epoch_end")


def fit(callbacks, **options):
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, num_sanity_val_steps=0, val_check_interval=2, callbacks=callbacks,
    )
    model = Model()
    data = DataLoader(TensorDataset(torch.ones(4, 1)), 1)
    trainer.fit(model, data, data, **options)
    return model.seen


task, *paths = sys.argv[1:]
if task == "save":
    fit([SaveInHooks()])
else:
    print(json.dumps({path: fit([], ckpt_path=path) for path in paths}))
"""


def run(folder: Path, *args: str, ours: bool) -> str:
    (folder / "script.py").write_text(SCRIPT)
    preloaded, runner = (warm.OURS, ["-m", "torch_compat"]) if ours else (warm.STOCK, [])
    done = warm.run(preloaded, [*runner, "script.py", *args], env=os.environ, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1] if done.stdout else ""


def test_counters_of_lightning_1_are_refused_by_name() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"there is no 'epoch_loop\.automatic.*but 'epoch_loop\.batch_loop.*upgrade_checkpoint"
    ):
        stock_loops.read({"epoch_loop.batch_loop.optimizer_loop.optim_progress": {}, "epoch_progress": {}})


@pytest.mark.slow
@pytest.mark.parity
def test_each_moment_is_continued_as_stock_does(tmp_path: Path) -> None:
    run(tmp_path, "save", ours=False)
    paths = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert len(paths) == 16
    stock = json.loads(run(tmp_path, "resume", *paths, ours=False))
    ours = json.loads(run(tmp_path, "resume", *paths, ours=True))
    # stock skips the epoch of a checkpoint saved at its very start; an undisturbed run trains it
    assert stock.pop("epoch_start.1.4.ckpt") == []
    assert ours.pop("epoch_start.1.4.ckpt") == [[1, 0, 4], [1, 1, 5], [1, 2, 6], [1, 3, 7]]
    assert {path for path in stock if ours[path] != stock[path]} == set()
