"""``Checkpoint``: what the trainer recognises as a callback that saves checkpoints."""

from __future__ import annotations

from torch_compat.callbacks.callback import Callback


class Checkpoint(Callback):
    """Base class of callbacks that save checkpoints; the trainer runs them after all other callbacks.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.Checkpoint.html
    """
