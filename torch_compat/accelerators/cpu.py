"""CPUs. API: ``lightning.pytorch.accelerators.CPUAccelerator``."""

from __future__ import annotations

from typing import Any

import torch

from torch_compat.accelerators.accelerator import Accelerator
from torch_compat.accelerators.jax_devices import local_devices
from torch_compat.utilities.exceptions import ArgumentValueError
from torch_compat.utilities.registry import AcceleratorRegistryType

_CPU_VM_PERCENT = "cpu_vm_percent"
_CPU_PERCENT = "cpu_percent"
_CPU_SWAP_PERCENT = "cpu_swap_percent"


class CPUAccelerator(Accelerator):
    """XLA's CPU devices; as many as ``Trainer(devices=…)`` asks for, in one process."""

    platform = "cpu"

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        """A positive number; ``"auto"`` is what JAX has.

        Raises:
            TypeError: something else, as in stock; ``Trainer(accelerator="cpu", devices=-1)`` means all, as elsewhere.
        """
        if devices == "auto":
            return CPUAccelerator.auto_device_count()
        if isinstance(devices, str) and devices.strip().isdigit():
            devices = int(devices)
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise TypeError(
                f"`devices` selected with `CPUAccelerator` should be an int > 0, found {devices!r}",
            )
        return devices

    @staticmethod
    def get_parallel_devices(devices: int | str) -> list[torch.device]:
        """A list of ``torch.device("cpu")``, once for each device: torch has no index for them."""
        return [torch.device("cpu")] * CPUAccelerator.parse_devices(devices)

    @staticmethod
    def auto_device_count() -> int:
        """The CPU devices that JAX has (1, unless ``jax_num_cpu_devices`` says more)."""
        return max(1, len(local_devices("cpu")))

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "cpu"

    def setup_device(self, device: torch.device) -> None:
        """Raises ``MisconfigurationException``, which is a ``ValueError`` too, for a device of another type."""
        if torch.device(device).type != "cpu":
            raise ArgumentValueError(f"Device should be CPU, got {device} instead.")

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """``cpu_percent``, ``cpu_vm_percent``, ``cpu_swap_percent``."""
        return get_cpu_stats()

    @classmethod
    def register_accelerators(cls, accelerator_registry: AcceleratorRegistryType) -> None:
        accelerator_registry.register("cpu", cls, description=cls.__name__, override=True)


def get_cpu_stats() -> dict[str, float]:
    """Use of the host in percent: ``cpu_percent``, ``cpu_vm_percent``, ``cpu_swap_percent``."""
    import psutil

    return {
        _CPU_VM_PERCENT: psutil.virtual_memory().percent,
        _CPU_PERCENT: psutil.cpu_percent(),
        _CPU_SWAP_PERCENT: psutil.swap_memory().percent,
    }


def _parse_cpu_cores(cpu_cores: int | str) -> int:
    """``Trainer(devices=…)`` as a number."""
    return CPUAccelerator.parse_devices(cpu_cores)
