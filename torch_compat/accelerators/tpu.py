"""TPUs. API: ``lightning.pytorch.accelerators.XLAAccelerator``, of 1.3 ``TPUAccelerator``."""

from __future__ import annotations

from typing import Any

import torch

from torch_compat.accelerators.accelerator import Accelerator
from torch_compat.accelerators.jax_devices import indices, local_devices, of
from torch_compat.utilities.registry import AcceleratorRegistryType


class XLAAccelerator(Accelerator):
    """The TPU chips that JAX sees on this host (the extra ``tpu``)."""

    platform = "tpu"

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int | list[int]:
        """A number of chips, or a list of indices."""
        found = indices(devices, XLAAccelerator.auto_device_count(), "TPU device")
        return found if isinstance(devices, list) else len(found)

    @staticmethod
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        return [torch.device("xla", index) for index in (range(devices) if isinstance(devices, int) else devices)]

    @staticmethod
    def auto_device_count() -> int:
        return len(local_devices("tpu"))

    @staticmethod
    def is_available() -> bool:
        return XLAAccelerator.auto_device_count() > 0

    @staticmethod
    def name() -> str:
        return "tpu"

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """JAX's memory statistics of the chip: ``bytes_in_use``, ``bytes_limit``, … in bytes."""
        return dict(of(device, "tpu").memory_stats() or {})

    @classmethod
    def register_accelerators(cls, accelerator_registry: AcceleratorRegistryType) -> None:
        accelerator_registry.register("tpu", cls, description=cls.__name__, override=True)
