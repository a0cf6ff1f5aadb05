"""Plugins of the Trainer. API: ``lightning.pytorch.plugins``."""

from __future__ import annotations

from torch_compat.plugins.eight_bits import EightBitPrecision, TransformerEnginePrecision
from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io import AsyncCheckpointIO, CheckpointIO, ShardedCheckpointIO, TorchCheckpointIO, XLACheckpointIO
from torch_compat.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch_compat.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch_compat.plugins.precision_by_strategy import FSDPPrecision, XLAPrecision

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointIO",
    "ClusterEnvironment",
    "DoublePrecision",
    "EightBitPrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "LayerSync",
    "MixedPrecision",
    "Precision",
    "ShardedCheckpointIO",
    "TorchCheckpointIO",
    "TorchSyncBatchNorm",
    "TransformerEnginePrecision",
    "XLACheckpointIO",
    "XLAPrecision",
]
