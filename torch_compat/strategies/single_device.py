"""The strategy for one device."""

from __future__ import annotations

from typing import Any

import torch

from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies.parallel import OnMesh
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_collectives import OneDeviceCollectives
from torch_compat.utilities.registry import StrategyRegistryType


class SingleDeviceStrategy(OneDeviceCollectives, OnMesh):
    """Training on one device of one process. API: ``lightning.pytorch.strategies.SingleDeviceStrategy``.

    Args:
        device: its torch name; which JAX device it is say ``Trainer(accelerator=…, devices=…)``.
    """

    strategy_name = "single_device"

    def __init__(
        self,
        device: Any = "cpu",
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        torch.device(device)  # an invalid name raises here

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        if n_devices != 1:
            raise MisconfigurationException(f"strategy='single_device' with {n_devices} devices; set devices=1 or strategy='ddp'")
        return {"data": 1}

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        strategy_registry.register("single_device", cls, description=cls.__name__, override=True)
