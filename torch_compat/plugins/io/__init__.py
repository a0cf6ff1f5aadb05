"""Checkpoint I/O: how checkpoints reach storage. API: ``lightning.pytorch.plugins.io``."""

from torch_compat.plugins.io.async_plugin import AsyncCheckpointIO
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.io.mesh_io import MeshCheckpointIO
from torch_compat.plugins.io.sharded_io import ShardedCheckpointIO
from torch_compat.plugins.io.torch_io import TorchCheckpointIO
from torch_compat.plugins.io.xla_plugin import XLACheckpointIO

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointIO",
    "MeshCheckpointIO",
    "ShardedCheckpointIO",
    "TorchCheckpointIO",
    "XLACheckpointIO",
]
