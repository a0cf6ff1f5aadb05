"""SIGTERM, once or again and again, in every phase of a fit: 75 inside of it, no status of its own once it has trained."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torch_compat as pl
from torch_compat.trainer.preemption import EXIT_STATUS

BEFORE = (
    "prepare_data", "setup", "configure_model", "configure_callbacks", "on_fit_start", "configure_optimizers",
    "on_load_checkpoint",
)  # fmt: skip
DURING = (
    "train_dataloader", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step", "on_validation_start",
    "on_train_epoch_end",
)  # fmt: skip
AFTER = ("on_train_end", "on_fit_end", "teardown")


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).pow(2).mean())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), 4)  # pyright: ignore[reportArgumentType]

    test_step = validation_step
    test_dataloader = val_dataloader = train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def hit_at(phase: str, times: int) -> Model:
    """A module whose hook ``phase`` gets the signal, ``times`` times, in its first call."""
    model = Model()
    hook = getattr(model, phase)
    left = [times]

    def hit(*args: Any, **kwargs: Any) -> Any:
        while left[0]:
            left[0] -= 1
            os.kill(os.getpid(), signal.SIGTERM)
        return hook(*args, **kwargs)

    kind = type("Hit", (Model,), {phase: lambda self, *args, **kwargs: hit(*args, **kwargs)})
    model.__class__ = kind
    return model


def status_of(model: Model, folder: Path, **options: Any) -> int:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[pl.callbacks.ModelCheckpoint(folder)],
    )  # fmt: skip
    try:
        trainer.fit(model, **options)
    except SystemExit as ended:
        assert trainer.received_sigterm
        return int(ended.code or 0)
    assert trainer.state.finished
    return 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert status_of(hit_at("on_train_batch_start", 1), folder) == EXIT_STATUS
    return folder / "preempted.ckpt"


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("phase", [*BEFORE, *DURING, *AFTER])
def test_the_status_says_how_far_it_came(phase: str, times: int, saved: Path, tmp_path: Path, capfd: Any) -> None:
    options = {"ckpt_path": str(saved)} if phase == "on_load_checkpoint" else {}
    status = status_of(hit_at(phase, times), tmp_path, **options)
    assert status == (0 if phase in AFTER else EXIT_STATUS)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    left = list(tmp_path.iterdir())
    if phase in BEFORE:
        assert not left
        assert "there is nothing new to save" in capfd.readouterr().err
    else:
        assert left


def test_without_checkpoints_the_signal_is_as_before(tmp_path: Path) -> None:
    seen = []

    class Looks(pl.callbacks.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[Looks()],
    )  # fmt: skip
    trainer.fit(Model())
    assert seen == [signal.SIG_DFL]


@pytest.mark.parametrize(
    ("stage", "hook"),
    [("fit", "on_train_batch_start"), ("validate", "on_validation_batch_start"), ("test", "on_test_batch_start")],
)
def test_without_checkpoints_a_run_ends_after_the_batch(stage: str, hook: str, tmp_path: Path) -> None:
    told = []

    class Told(pl.callbacks.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            told.append((type(exception).__name__, trainer.global_step, trainer.received_sigterm))

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Told(), pl.callbacks.OnExceptionCheckpoint(tmp_path)], num_sanity_val_steps=0,
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        getattr(trainer, stage)(hit_at(hook, 1))
    assert ended.value.code == EXIT_STATUS
    assert told == [("SIGTERMException", int(stage == "fit"), True)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [path.name for path in tmp_path.iterdir()] == ["on_exception.ckpt"]
