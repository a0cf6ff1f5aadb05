"""The error that ended a run is the one that is raised, whatever fails afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from torch_compat import LightningModule, Trainer
from torch_compat.run.first_error import run_all
from torch_compat.strategies import DDPStrategy

HOOKS = (
    "prepare_data", "setup", "configure_model", "on_fit_start", "configure_optimizers", "train_dataloader", "on_train_start",
    "on_train_epoch_start", "on_train_batch_start", "training_step", "on_before_optimizer_step", "on_train_batch_end",
    "on_validation_start", "validation_step", "on_validation_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.layer(batch).square().mean())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 2), 2)  # pyright: ignore[reportArgumentType]

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class FailsToEnd(DDPStrategy):
    def teardown(self) -> None:
        super().teardown()
        raise OSError("the strategy could not be taken down")


def fit(module: LightningModule) -> None:
    Trainer(
        accelerator="cpu", devices=1, strategy=FailsToEnd(), max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    ).fit(module)  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_the_error_of_a_hook_is_raised_though_the_end_fails_too(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise LookupError(f"in {hook}")

    with pytest.raises(LookupError, match=f"in {hook}") as raised:
        fit(type("Failing", (Model,), {hook: fail})())
    assert any("OSError was raised" in note and "could not be taken down" in note for note in raised.value.__notes__)


def test_without_another_error_that_of_the_end_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    with pytest.raises(OSError, match="could not be taken down"):
        fit(Model())


def test_all_parts_run_and_the_first_error_has_the_others_as_notes() -> None:
    ran = []

    def fail(kind: type[Exception]) -> None:
        ran.append(kind)
        raise kind("failed")

    with pytest.raises(ValueError, match="failed") as raised:
        run_all([lambda: fail(ValueError), lambda: fail(KeyError), lambda: ran.append(None)])
    assert ran == [ValueError, KeyError, None]
    [note] = raised.value.__notes__
    assert "KeyError was raised" in note
    with pytest.warns(UserWarning, match="TypeError was raised"):
        run_all([lambda: fail(TypeError)], KeyboardInterrupt())
