"""torch_tpu, on one chip."""

from __future__ import annotations

from torch_compat.device_backends import DeviceBackend
from torch_compat.device_backends.torch_tpu import TorchTPU
from torch_compat.strategies.on_device import DeviceStrategy
from torch_compat.utilities.registry import StrategyRegistryType


class TorchTPUStrategy(DeviceStrategy):
    """User code op by op on one TPU chip through torch_tpu, the successor of torch-xla. Never run: there was no TPU.

    Raises:
        MisconfigurationException: when a Trainer takes it: torch_tpu or the chip is missing, or several devices are asked for.
    """

    strategy_name = "torch_tpu"

    def make_backend(self, platform: str | None, devices: int | None) -> DeviceBackend:
        return TorchTPU("strategy='torch_tpu'", platform, devices)

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        return {"data": n_devices}

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        strategy_registry.register("torch_tpu", cls, description=cls.__name__, override=True)
