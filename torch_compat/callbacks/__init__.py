"""Callbacks: behaviour around a run that is neither the module's nor the loop's."""

from __future__ import annotations

from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.checkpoint import Checkpoint
from torch_compat.callbacks.model_checkpoint import ModelCheckpoint
from torch_compat.callbacks.progress import ProgressBar, TQDMProgressBar

__all__ = ["Callback", "Checkpoint", "ModelCheckpoint", "ProgressBar", "TQDMProgressBar"]
