"""Plugins of the Trainer. API: ``lightning.pytorch.plugins``."""

from __future__ import annotations

from torch_compat.plugins.io import AsyncCheckpointIO, CheckpointIO, ShardedCheckpointIO, TorchCheckpointIO
from torch_compat.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch_compat.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch_compat.refused import refusing

__all__ = [
    "AsyncCheckpointIO",
    "CheckpointIO",
    "DoublePrecision",
    "HalfPrecision",
    "LayerSync",
    "MixedPrecision",
    "Precision",
    "ShardedCheckpointIO",
    "TorchCheckpointIO",
    "TorchSyncBatchNorm",
]

_REFUSED = {
    "BitsandbytesPrecision": "bitsandbytes replaces layers by CUDA kernels, which XLA cannot call; use "
    "Trainer(precision='bf16-true')",
    "TransformerEnginePrecision": "Transformer Engine replaces layers by CUDA kernels, which XLA cannot call; use "
    "Trainer(precision='bf16-mixed')",
    "DeepSpeedPrecision": "DeepSpeed's kernels are for CUDA; use Trainer(precision=…) with strategy='fsdp'",
    "FSDPPrecision": "parameters are sharded by XLA; use Trainer(precision=…)",
    "XLAPrecision": "use Trainer(precision=…), with strategy='torch_xla' too",
    "XLACheckpointIO": "use ShardedCheckpointIO or TorchCheckpointIO, with strategy='torch_xla' too",
}


__getattr__ = refusing("lightning.pytorch.plugins", _REFUSED)
