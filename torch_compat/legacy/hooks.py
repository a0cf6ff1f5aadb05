"""Hooks of 1.4 and 1.5, with their parameters. API: ``pytorch_lightning.core.hooks``.

Each is a superset of today's hook: what an era added has a default, so that modules of 2.x, too, may call ``super()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from torch_compat.core import hooks
from torch_compat.utilities.types import STEP_OUTPUT


class CheckpointHooks(hooks.CheckpointHooks):
    """Hooks that add to, and read from, a checkpoint."""


class DataHooks(hooks.DataHooks):
    """Hooks that prepare, load and move data."""

    def setup(self, stage: str | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Called on every process at the beginning of a run."""

    def teardown(self, stage: str | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Called on every process at the end of a run."""

    def on_train_dataloader(self) -> None:
        """Before the training loader is asked for."""

    def on_val_dataloader(self) -> None:
        """Before the validation loaders are asked for."""

    def on_test_dataloader(self) -> None:
        """Before the test loaders are asked for."""

    def on_predict_dataloader(self) -> None:
        """Before the predict loaders are asked for."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int = 0) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class ModelHooks(hooks.ModelHooks):
    """Hooks around runs, epochs, batches and the parts of a training step."""

    def on_pretrain_routine_start(self) -> None:
        """After ``on_fit_start``, before a checkpoint's training state is restored."""

    def on_pretrain_routine_end(self) -> None:
        """After a checkpoint's training state is restored, before training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> int | None:
        """Before each training batch; -1 skips the rest of the epoch."""

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After each training batch."""

    def on_epoch_start(self) -> None:
        """Before each epoch's own hook: of training, validation, test and prediction."""

    def on_epoch_end(self) -> None:
        """After each epoch's own hook: of training, validation, test and prediction."""

    def on_train_epoch_end(self, unused: Any = None) -> None:
        """At the end of each training epoch, after ``training_epoch_end``. A parameter ``outputs`` gets the epoch's outputs."""

    def on_predict_epoch_end(self, results: Any = None) -> None:
        """At the end of the predict epoch, with all predictions."""

    def on_before_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int = 0) -> None:
        """Before each real optimizer step; gradients are unscaled and not clipped yet."""

    def on_post_move_to_device(self) -> None:
        """When parameters are placed: weights that are tied here are one in the program and in checkpoints."""

    def training_step_end(self, step_output: Any) -> Any:
        """After ``training_step``, inside what is differentiated: the loss it returns is minimised."""
        return step_output

    def validation_step_end(self, step_output: Any) -> Any:
        """After ``validation_step``, inside the program."""
        return step_output

    def test_step_end(self, step_output: Any) -> Any:
        """After ``test_step``, inside the program."""
        return step_output

    def training_epoch_end(self, outputs: Any) -> None:
        """At the end of the training epoch, with what every batch gave."""

    def validation_epoch_end(self, outputs: Any) -> None:
        """At the end of the validation epoch: a list of outputs, one such list for each of several loaders."""

    def test_epoch_end(self, outputs: Any) -> None:
        """At the end of the test epoch; as :meth:`validation_epoch_end`."""
