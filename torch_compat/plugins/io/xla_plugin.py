"""Checkpoints of torch-xla in one file. API: ``lightning.pytorch.plugins.io.XLACheckpointIO``."""

from __future__ import annotations

from typing import Any

from torch_compat.plugins.io.torch_io import TorchCheckpointIO
from torch_compat.utilities.imports import _XLA_AVAILABLE


class XLACheckpointIO(TorchCheckpointIO):
    """A file that ``torch.save`` writes, of tensors that come from torch-xla's devices.

    Raises:
        ModuleNotFoundError: there is no torch_xla, as in stock. ``ShardedCheckpointIO`` is what JAX's runs use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not _XLA_AVAILABLE:
            raise ModuleNotFoundError(f"{_XLA_AVAILABLE}; a run on JAX saves with ShardedCheckpointIO or TorchCheckpointIO")
        super().__init__(*args, **kwargs)
