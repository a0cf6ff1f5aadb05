"""``BasePredictionWriter``: base class of callbacks that store predictions."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


class WriteInterval(StrEnum):
    """The time at which predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether ``write_on_batch_end`` is called."""
        return self in (self.BATCH, self.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """Whether ``write_on_epoch_end`` is called."""
        return self in (self.EPOCH, self.BATCH_AND_EPOCH)


class BasePredictionWriter(Callback):
    """Subclass it and override ``write_on_batch_end``, ``write_on_epoch_end`` or both. Each process gets the predictions of its
    rows.

    With "epoch", predictions are kept until the end: pass ``return_predictions=False`` and "batch" where they do not fit in
    memory.

    Args:
        write_interval: "batch", "epoch" or "batch_and_epoch".

    Raises:
        MisconfigurationException: a ``write_interval`` that is none of these.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.BasePredictionWriter.html
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        if write_interval not in set(WriteInterval):
            raise MisconfigurationException(
                f"`write_interval` should be one of {[str(one) for one in WriteInterval]}; found {write_interval!r}"
            )
        self.interval = WriteInterval(write_interval)

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Stores the prediction of one batch; ``batch_indices`` are the dataset's indices of its rows, None if unknown."""
        raise NotImplementedError(f"{type(self).__name__}(write_interval={self.interval!s}) must override write_on_batch_end.")

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        """Stores all predictions: a list per batch, of lists per dataloader if there are several; ``batch_indices`` alike."""
        raise NotImplementedError(f"{type(self).__name__}(write_interval={self.interval!s}) must override write_on_epoch_end.")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.interval.on_batch:
            indices = trainer.predict_loop.current_batch_indices
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.interval.on_epoch:
            loop = trainer.predict_loop
            self.write_on_epoch_end(trainer, pl_module, loop.predictions, loop.epoch_batch_indices)
