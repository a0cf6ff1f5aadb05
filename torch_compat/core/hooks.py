"""The hooks of Lightning 2.6: every method that a user may override and that the Trainer calls.

Signatures and defaults are those of ``lightning.pytorch.core.hooks``. Hooks of earlier eras are not here: they belong to
``torch_compat/legacy``. Where a hook runs on a mesh (host, or inside the compiled step) is said where that matters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from torch_compat.utilities.device_transfer import move_data_to_device
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS


class RunHooks:
    """Hooks at the beginning and the end of each kind of run, of modules and of strategies."""

    def on_train_start(self) -> None:
        """Called at the beginning of training, after the sanity check."""

    def on_train_end(self) -> None:
        """Called at the end of training, before the loggers are closed."""

    def on_validation_start(self) -> None:
        """Called at the beginning of validation."""

    def on_validation_end(self) -> None:
        """Called at the end of validation."""

    def on_test_start(self) -> None:
        """Called at the beginning of testing."""

    def on_test_end(self) -> None:
        """Called at the end of testing."""

    def on_predict_start(self) -> None:
        """Called at the beginning of predicting."""

    def on_predict_end(self) -> None:
        """Called at the end of predicting."""


class ModelHooks(RunHooks):
    """Hooks around runs, epochs, batches and the parts of a training step."""

    def on_fit_start(self) -> None:
        """Called at the very beginning of fit, on every process."""

    def on_fit_end(self) -> None:
        """Called at the very end of fit, on every process."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before each training batch. Return ``-1`` to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        """Called after each training batch.

        Args:
            outputs: what ``training_step`` returned; a loss is detached and not divided by ``accumulate_grad_batches``.
            batch: the batch on its device.
            batch_idx: index of the batch in the epoch.
        """

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each validation batch, with what ``validation_step`` returned."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each test batch, with what ``test_step`` returned."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each predict batch."""

    def on_predict_batch_end(self, outputs: Any | None, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each predict batch, with what ``predict_step`` returned."""

    def on_validation_model_zero_grad(self) -> None:
        """Called before validation inside a fit, to release the gradients' memory (``self.zero_grad()`` by default)."""
        zero_grad = getattr(self, "zero_grad", None)
        if zero_grad is not None:
            zero_grad()

    def on_validation_model_eval(self) -> None:
        """Called before validation to put the model in eval mode; each submodule's mode is given back afterwards."""
        self.trainer.model.eval()  # pyright: ignore[reportAttributeAccessIssue]

    def on_validation_model_train(self) -> None:
        """Called after validation when overridden: the Trainer otherwise restores each submodule's former mode itself."""
        self.trainer.model.train()  # pyright: ignore[reportAttributeAccessIssue]

    def on_test_model_eval(self) -> None:
        """Called before testing to put the model in eval mode."""
        self.trainer.model.eval()  # pyright: ignore[reportAttributeAccessIssue]

    def on_test_model_train(self) -> None:
        """Called after testing when overridden; see :meth:`on_validation_model_train`."""
        self.trainer.model.train()  # pyright: ignore[reportAttributeAccessIssue]

    def on_predict_model_eval(self) -> None:
        """Called before predicting to put the model in eval mode."""
        self.trainer.model.eval()  # pyright: ignore[reportAttributeAccessIssue]

    def on_train_epoch_start(self) -> None:
        """Called at the beginning of each training epoch."""

    def on_train_epoch_end(self) -> None:
        """Called at the end of each training epoch, before the epoch's logged values are reduced."""

    def on_validation_epoch_start(self) -> None:
        """Called at the beginning of each validation epoch."""

    def on_validation_epoch_end(self) -> None:
        """Called at the end of each validation epoch."""

    def on_test_epoch_start(self) -> None:
        """Called at the beginning of the test epoch."""

    def on_test_epoch_end(self) -> None:
        """Called at the end of the test epoch."""

    def on_predict_epoch_start(self) -> None:
        """Called at the beginning of the predict epoch."""

    def on_predict_epoch_end(self) -> None:
        """Called at the end of the predict epoch."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called after ``training_step`` and before ``optimizer.zero_grad()``."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before ``loss.backward()``, with the loss divided by ``accumulate_grad_batches``."""

    def on_after_backward(self) -> None:
        """Called after every ``loss.backward()``, in accumulation too; gradients are not unscaled or clipped yet."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each real ``optimizer.step()``; gradients are unscaled and not clipped yet."""

    def configure_sharded_model(self) -> None:
        """Deprecated: :meth:`configure_model`."""

    def configure_model(self) -> None:
        """Called before ``configure_optimizers``, in the strategy's context for creating (sharded) parameters.

        It is called once for each fit, validate, test and predict: make it idempotent.
        """


class DataHooks:
    """Hooks that prepare, load and move data; shared by LightningModule and LightningDataModule.

    Attributes:
        prepare_data_per_node: whether ``prepare_data`` runs on one process of each host (True) or only on process 0.
        allow_zero_length_dataloader_with_multiple_devices: a loader without batches is no error with several devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prepare_data_per_node: bool = True
        self.allow_zero_length_dataloader_with_multiple_devices: bool = False

    def prepare_data(self) -> None:
        """Download and write data here: runs on one process per host, so set no state (that is ``setup``'s task)."""

    def setup(self, stage: str) -> None:
        """Called on every process at the beginning of a run.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, stage: str) -> None:
        """Called on every process at the end of a run; ``stage`` as in :meth:`setup`."""

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        """The training data: a loader, or any nesting of lists and dicts of loaders (then see ``CombinedLoader``)."""
        raise MisconfigurationException(
            "`train_dataloader` must be implemented to be used with the Lightning Trainer, or loaders be passed"
        )

    def test_dataloader(self) -> EVAL_DATALOADERS:
        """The test data: a loader or a sequence of loaders; ``test_step`` then gets ``dataloader_idx``."""
        raise MisconfigurationException(
            "`test_dataloader` must be implemented to be used with the Lightning Trainer, or loaders be passed"
        )

    def val_dataloader(self) -> EVAL_DATALOADERS:
        """The validation data: a loader or a sequence of loaders; ``validation_step`` then gets ``dataloader_idx``."""
        raise MisconfigurationException(
            "`val_dataloader` must be implemented to be used with the Lightning Trainer, or loaders be passed"
        )

    def predict_dataloader(self) -> EVAL_DATALOADERS:
        """The data to predict: a loader or a sequence of loaders; ``predict_step`` then gets ``dataloader_idx``."""
        raise MisconfigurationException(
            "`predict_dataloader` must be implemented to be used with the Lightning Trainer, or loaders be passed"
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Moves ``batch`` to ``device``: override it for data structures that have no ``.to(device)``."""
        return move_data_to_device(batch, device)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Alters or augments ``batch`` (CPU tensors) before it is moved to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Alters or augments ``batch`` after it was moved; on a mesh it is part of the compiled step when it is pure."""
        return batch


class CheckpointHooks:
    """Hooks that add to, and read from, a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before the state is restored, with the whole checkpoint dict."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before the checkpoint dict is written; what it adds must be readable by ``torch.load(weights_only=True)``."""
