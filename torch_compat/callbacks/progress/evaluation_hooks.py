"""The batch hooks of validation, test and prediction, which do the same to different bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.progress.progress_bar import ProgressBar

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


class EvaluationHooks(ProgressBar):
    """Turns them into calls of `_start_loader`, when another dataloader begins, and `_advance_to`."""

    def _start_loader(self, trainer: Trainer, stage: str, dataloader_idx: int) -> None:
        """A dataloader of `stage` ("val", "test" or "predict") begins."""
        raise NotImplementedError

    def _advance_to(self, trainer: Trainer, stage: str, done: int) -> None:
        """So many batches of the current dataloader are done."""
        raise NotImplementedError

    def _batch_start(self, trainer: Trainer, stage: str, dataloader_idx: int) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            self._start_loader(trainer, stage, dataloader_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._batch_start(trainer, "val", dataloader_idx)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._batch_start(trainer, "test", dataloader_idx)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._batch_start(trainer, "predict", dataloader_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance_to(trainer, "val", batch_idx + 1)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance_to(trainer, "test", batch_idx + 1)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance_to(trainer, "predict", batch_idx + 1)
