"""Strategies of the Trainer. API: ``lightning.pytorch.strategies``."""

from torch_compat.strategies.ddp import DDPStrategy, SingleDeviceStrategy
from torch_compat.strategies.fsdp import FSDPStrategy
from torch_compat.strategies.mesh import MeshStrategy
from torch_compat.strategies.strategy import Strategy

__all__ = ["DDPStrategy", "FSDPStrategy", "MeshStrategy", "SingleDeviceStrategy", "Strategy"]
