"""Plugins of the Trainer. API: ``lightning.pytorch.plugins``."""

from __future__ import annotations

from typing import NoReturn

from torch_compat.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

__all__ = ["DoublePrecision", "HalfPrecision", "MixedPrecision", "Precision"]

_REFUSED = {
    "BitsandbytesPrecision": "bitsandbytes replaces layers by CUDA kernels, which XLA cannot call; use "
    "Trainer(precision='bf16-true')",
    "TransformerEnginePrecision": "Transformer Engine replaces layers by CUDA kernels, which XLA cannot call; use "
    "Trainer(precision='bf16-mixed')",
    "DeepSpeedPrecision": "DeepSpeed's kernels are for CUDA; use Trainer(precision=…) with strategy='fsdp'",
    "FSDPPrecision": "parameters are sharded by XLA; use Trainer(precision=…)",
    "XLAPrecision": "the torch-xla path is not in this version; use Trainer(precision=…)",
    "CheckpointIO": "there is one checkpoint format in this version, sharded directories",
    "AsyncCheckpointIO": "ModelCheckpoint saves in the background already",
    "TorchCheckpointIO": "there is one checkpoint format in this version, sharded directories",
    "XLACheckpointIO": "there is one checkpoint format in this version, sharded directories",
    "TorchSyncBatchNorm": "BatchNorm sees the global batch in a compiled step",
    "LayerSync": "layers see the global batch in a compiled step",
}


def __getattr__(name: str) -> NoReturn:
    if name in _REFUSED:
        raise ImportError(f"lightning.pytorch.plugins.{name} is not offered on an XLA mesh: {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
