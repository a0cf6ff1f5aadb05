"""Plugins of the Trainer. API: ``lightning.pytorch.plugins``."""

from __future__ import annotations

from typing import Any

from torch_compat.plugins import precision
from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io import AsyncCheckpointIO, CheckpointIO, ShardedCheckpointIO, TorchCheckpointIO, XLACheckpointIO
from torch_compat.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch_compat.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch_compat.plugins.precision_by_strategy import FSDPPrecision, XLAPrecision
from torch_compat.utilities.refused import refusing

_refused = refusing(
    "lightning.pytorch.plugins", {"HPUCheckpointIO": "Habana's accelerator needs a package of its own; use TorchCheckpointIO"}
)

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointIO",
    "ClusterEnvironment",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "LayerSync",
    "MixedPrecision",
    "Precision",
    "ShardedCheckpointIO",
    "TorchCheckpointIO",
    "TorchSyncBatchNorm",
    "XLACheckpointIO",
    "XLAPrecision",
]


def __getattr__(name: str) -> Any:
    if name == "_PLUGIN_INPUT":
        from torch_compat.trainer.argument_types import PluginInput

        return PluginInput
    if name == "HPUCheckpointIO":
        return _refused(name)
    return getattr(precision, name)  # the names of 1.x, and those that are refused
