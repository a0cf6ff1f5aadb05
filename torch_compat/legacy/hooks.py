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
        """Called before the training loader is asked for."""

    def on_val_dataloader(self) -> None:
        """Called before the validation loaders are asked for."""

    def on_test_dataloader(self) -> None:
        """Called before the test loaders are asked for."""

    def on_predict_dataloader(self) -> None:
        """Called before the predict loaders are asked for."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int = 0) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class ModelHooks(hooks.ModelHooks):
    """Hooks around runs, epochs, batches and the parts of a training step."""

    def on_pretrain_routine_start(self) -> None:
        """Called after ``on_fit_start``, before a checkpoint's training state is restored."""

    def on_pretrain_routine_end(self) -> None:
        """Called after a checkpoint's training state is restored, before training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> int | None:
        """Called before each training batch; -1 skips the rest of the epoch."""

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each training batch."""

    def on_epoch_start(self) -> None:
        """Called before each epoch's own hook: of training, validation, test and prediction."""

    def on_epoch_end(self) -> None:
        """Called after each epoch's own hook: of training, validation, test and prediction."""

    def on_train_epoch_end(self, unused: Any = None) -> None:
        """Called at the end of each training epoch, after ``training_epoch_end``. A parameter ``outputs`` gets its outputs."""

    def on_predict_epoch_end(self, results: Any = None) -> None:
        """Called at the end of the predict epoch, with all predictions."""

    def on_before_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int = 0) -> None:
        """Called before each real optimizer step; gradients are unscaled and not clipped yet."""

    def on_post_move_to_device(self) -> None:
        """Called when parameters are placed: weights that are tied here are shared in the program and in checkpoints."""

    def training_step_end(self, step_output: Any) -> Any:
        """Called after ``training_step``, inside what is differentiated: the loss it returns is minimised."""
        return step_output

    def validation_step_end(self, step_output: Any) -> Any:
        """Called after ``validation_step``, inside the program."""
        return step_output

    def test_step_end(self, step_output: Any) -> Any:
        """Called after ``test_step``, inside the program."""
        return step_output

    def training_epoch_end(self, outputs: Any) -> None:
        """Called at the end of the training epoch, with every batch's outputs."""

    def validation_epoch_end(self, outputs: Any) -> None:
        """Called at the end of the validation epoch, with a list of outputs, or a list of such lists for several loaders."""

    def test_epoch_end(self, outputs: Any) -> None:
        """Called at the end of the test epoch, see :meth:`validation_epoch_end`."""
