"""A run that is stopped anywhere and continued gives bit-identical weights and the same sample order as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import ModelCheckpoint


class Recorded(LightningModule):
    """Dropout, BatchNorm and a schedule: state of every kind. ``seen`` has the first target of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 16), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
        )
        self.seen: list[float] = []
        self.validated: list[int] = []

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()

    def on_train_batch_start(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.seen.append(float(batch[1][0]))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Renamed(Recorded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = self.net
        del self.net

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return ((self.layers(batch[0]) - batch[1]) ** 2).mean()


def test_another_module_is_told_how_to_go_on(tmp_path: Path) -> None:
    run(tmp_path, 4, save_every=4)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    data = DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4, 1)), 4)
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for Renamed") as raised:
        trainer.validate(Renamed(), data, ckpt_path=tmp_path / "step=4.ckpt", verbose=False)
    [note] = raised.value.__notes__
    assert note.startswith(f"The checkpoint at {tmp_path / 'step=4.ckpt'} was saved from another Renamed")
    assert "load_from_checkpoint(path, strict=False)" in note


def run(
    folder: Path, max_steps: int, *, save_every: int | None = None, resume: Path | None = None, **options: object
) -> Recorded:
    torch.manual_seed(1)
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=save_every, save_top_k=-1)] if save_every else None
    trainer = Trainer(
        accelerator="cpu", devices=8, max_epochs=3, max_steps=max_steps, callbacks=callbacks, logger=False,
        enable_checkpointing=bool(save_every), enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    module = Recorded()
    trainer.fit(module, DataLoader(data, 2, shuffle=True), DataLoader(data, 4), ckpt_path=resume)
    assert trainer.global_step == (max_steps if max_steps > 0 else 21)
    return module


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return run(tmp_path_factory.mktemp("whole"), -1)


@pytest.mark.parametrize("stop", [7, 10])  # at the end of the first epoch, inside the second
def test_continued_run_is_the_uninterrupted_one(tmp_path: Path, stop: int, whole: Recorded) -> None:
    first = run(tmp_path, stop, save_every=stop)
    second = run(tmp_path, -1, resume=tmp_path / f"step={stop}.ckpt")
    assert first.seen + second.seen == whole.seen
    for (name, ours), theirs in zip(second.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_validation_that_was_due_when_saved_runs_after_resuming(tmp_path: Path) -> None:
    whole = run(tmp_path, -1, val_check_interval=2)
    run(tmp_path, 4, save_every=4, val_check_interval=2)
    second = run(tmp_path, -1, resume=tmp_path / "step=4.ckpt", val_check_interval=2)
    assert second.validated == [step for step in whole.validated if step >= 4]
