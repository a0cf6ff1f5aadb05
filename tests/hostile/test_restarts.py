"""A run that is killed between a commit and the removal of what it replaced leaves nothing behind that the next start keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torch_compat as pl


class NothingIsRemoved(pl.callbacks.Callback):
    """From an epoch on no checkpoint that is there can be removed: as in a process that is killed before it does."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            for path in self.folder.glob("*.ckpt"):
                (path / "foreign").touch()


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), 4)  # pyright: ignore[reportArgumentType]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(folder: Path, options: dict[str, Any], *, epochs: int = 5, dies_in: int | None = None) -> None:
    callbacks = [pl.callbacks.ModelCheckpoint(folder, **options)]
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="fsdp", max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks if dies_in is None else [*callbacks, NothingIsRemoved(folder, dies_in)],
    )  # fmt: skip
    trainer.fit(Model(), ckpt_path="auto")
    for left in folder.glob("*.ckpt/foreign"):
        left.unlink()


OPTIONS: list[dict[str, Any]] = [{}, {"monitor": "loss", "save_top_k": 2}, {"monitor": "loss", "mode": "max", "save_last": True}]


@pytest.mark.parametrize("dies_in", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_no_more_than_the_undisturbed_run_keeps(tmp_path: Path, options: dict[str, Any], dies_in: int) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, options)
    run(killed, options, epochs=dies_in + 1, dies_in=dies_in)
    (killed / "began.ckpt").mkdir()  # of a save that had written nothing
    run(killed, options)
    assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in whole.iterdir())
