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
from torch_compat.utilities.refused import refusing
from torch_compat.utilities.registry import StrategyRegistryType

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

SingleTPUStrategy = SingleDeviceXLAStrategy
"""The name of eras 1.3 to 1.9."""

__all__ = [
    "DDPSpawnStrategy",
    "DDPStrategy",
    "FSDPStrategy",
    "MeshStrategy",
    "ModelParallelStrategy",
    "ParallelStrategy",
    "SingleDeviceStrategy",
    "SingleDeviceXLAStrategy",
    "SingleTPUStrategy",
    "Strategy",
    "StrategyRegistry",
    "TorchTPUStrategy",
    "XLAFSDPStrategy",
    "XLAStrategy",
]

_REFUSED = {
    "DeepSpeedStrategy": "DeepSpeed's kernels are for CUDA: use FSDPStrategy, which shards optimizer state too",
    "remove_module_hooks": "DeepSpeed's kernels are for CUDA: use FSDPStrategy",
    "HPUParallelStrategy": "Habana's accelerator needs a package of its own: use DDPStrategy",
    "SingleHPUStrategy": "Habana's accelerator needs a package of its own: use SingleDeviceStrategy",
    "DataParallelStrategy": "every strategy here drives all devices of a process: use DDPStrategy",
    "DDP2Strategy": "every strategy here drives all devices of a process: use DDPStrategy",
    "DDPFullyShardedNativeStrategy": "1.x's name: use FSDPStrategy",
    "DDPFullyShardedStrategy": "1.x's name: use FSDPStrategy",
    "DDPShardedStrategy": "1.x's name: use FSDPStrategy, which shards parameters, gradients and optimizer state",
    "DDPSpawnShardedStrategy": "1.x's name: use FSDPStrategy, which drives all devices of a host from one process",
    "HorovodStrategy": "XLA compiles the collectives: use DDPStrategy",
    "HivemindStrategy": "processes join one world: use DDPStrategy",
    "BaguaStrategy": "XLA compiles the collectives: use DDPStrategy",
    "CollaborativeStrategy": "processes join one world: use DDPStrategy",
}


__getattr__ = refusing("lightning.pytorch.strategies", _REFUSED, lambda: Strategy)
