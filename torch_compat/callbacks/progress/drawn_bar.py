"""``DrawnBar``: what the bars of tqdm and rich have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.progress.progress_bar import ProgressBar

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


class DrawnBar(ProgressBar):
    """A bar that is drawn at a rate, and can be switched off.

    The batch hooks of validation, test and prediction, which do the same to different bars, become calls of ``_start_loader``,
    when another dataloader begins, and of ``_advance_to``.

    Args:
        refresh_rate: how often it is drawn, in the bar's own unit; 0 for never.
    """

    def __init__(self, refresh_rate: int) -> None:
        super().__init__()
        self._refresh_rate = refresh_rate
        self._enabled = True

    @property
    def refresh_rate(self) -> int:
        """The number of batches between two refreshes; 0 for none."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether bars are drawn."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether bars are not drawn."""
        return not self.is_enabled

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def _start_loader(self, trainer: Trainer, stage: str, dataloader_idx: int) -> None:
        """A dataloader of ``stage`` ("val", "test" or "predict") begins."""
        raise NotImplementedError

    def _advance_to(self, trainer: Trainer, stage: str, done: int) -> None:
        """Show that so many batches of the current dataloader are done."""
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
