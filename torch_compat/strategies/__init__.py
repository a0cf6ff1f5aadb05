"""Strategies of the Trainer. API: ``lightning.pytorch.strategies``."""

from __future__ import annotations

from torch_compat.strategies.ddp import DDPStrategy
from torch_compat.strategies.ddp_spawn import DDPSpawnStrategy
from torch_compat.strategies.fsdp import FSDPStrategy
from torch_compat.strategies.mesh import MeshStrategy
from torch_compat.strategies.model_parallel import ModelParallelStrategy
from torch_compat.strategies.parallel import ParallelStrategy
from torch_compat.strategies.single_device import SingleDeviceStrategy
from torch_compat.strategies.strategy import Strategy
from torch_compat.strategies.torch_tpu import TorchTPUStrategy
from torch_compat.strategies.xla import SingleDeviceXLAStrategy, XLAStrategy
from torch_compat.strategies.xla_fsdp import XLAFSDPStrategy
from torch_compat.utilities.registry import StrategyRegistryType, register_stocks_own

StrategyRegistry = StrategyRegistryType()
for _kind in (
    DDPStrategy,
    DDPSpawnStrategy,
    FSDPStrategy,
    MeshStrategy,
    SingleDeviceStrategy,
    SingleDeviceXLAStrategy,
    TorchTPUStrategy,
    XLAFSDPStrategy,
    XLAStrategy,
):
    _kind.register_strategies(StrategyRegistry)
register_stocks_own(StrategyRegistry, "lightning.pytorch")

__all__ = [
    "DDPSpawnStrategy",
    "DDPStrategy",
    "FSDPStrategy",
    "MeshStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "SingleDeviceXLAStrategy",
    "Strategy",
    "StrategyRegistry",
    "TorchTPUStrategy",
    "XLAFSDPStrategy",
    "XLAStrategy",
]
