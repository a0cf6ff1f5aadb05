"""Strategies of Fabric. API: ``lightning.fabric.strategies``."""

from __future__ import annotations

from typing import NoReturn

from torch_compat.fabric.strategies.data_parallel import DDPStrategy, SingleDeviceStrategy
from torch_compat.fabric.strategies.strategy import Strategy
from torch_compat.utilities.registry import StrategyRegistryType

STRATEGY_REGISTRY = StrategyRegistryType()
for _kind in (DDPStrategy, SingleDeviceStrategy):
    _kind.register_strategies(STRATEGY_REGISTRY)

__all__ = ["STRATEGY_REGISTRY", "DDPStrategy", "SingleDeviceStrategy", "Strategy"]

_REFUSED = {
    "DeepSpeedStrategy": "DeepSpeed's kernels are for CUDA: use the Trainer's FSDPStrategy",
    "FSDPStrategy": "use the Trainer's FSDPStrategy, which compiles the step",
    "ModelParallelStrategy": "use the Trainer's MeshStrategy, which compiles the step",
    "DataParallelStrategy": "use DDPStrategy",
    "XLAStrategy": "JAX drives TPUs: use the Trainer's strategies",
    "XLAFSDPStrategy": "JAX drives TPUs: use the Trainer's FSDPStrategy",
    "SingleDeviceXLAStrategy": "JAX drives TPUs: use the Trainer's strategies",
}


def __getattr__(name: str) -> NoReturn:
    if name in _REFUSED:
        raise ImportError(f"lightning.fabric.strategies.{name} is not offered: {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
