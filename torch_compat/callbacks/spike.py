"""``SpikeDetection`` as a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.spike import SpikeDetection as _SpikeDetection

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import STEP_OUTPUT


class SpikeDetection(_SpikeDetection, Callback):
    """Ends training with a ``TrainingSpikeException`` when the loss jumps; see ``torch_compat.utilities.spike.SpikeDetection``.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.SpikeDetection.html
    """

    @torch.no_grad()
    def on_train_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is None:  # training_step skipped the batch
            return
        super().on_train_batch_end(trainer, loss.detach(), batch, batch_idx)  # pyright: ignore[reportArgumentType]
