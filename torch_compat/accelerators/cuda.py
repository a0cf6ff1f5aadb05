"""NVIDIA's GPUs. API: ``lightning.pytorch.accelerators.CUDAAccelerator``."""

from __future__ import annotations

from typing import Any

import torch

from torch_compat.accelerators.accelerator import Accelerator
from torch_compat.accelerators.jax_devices import indices, local_devices, of
from torch_compat.utilities.registry import AcceleratorRegistryType


class CUDAAccelerator(Accelerator):
    """The GPUs that JAX sees (``pip install 'xlatrain[cuda]'``); torch itself need not have CUDA."""

    platform = "gpu"

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int] | None:
        """Indices of JAX's GPUs."""
        return indices(devices, CUDAAccelerator.auto_device_count(), "GPU")

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return len(local_devices("gpu"))

    @staticmethod
    def is_available() -> bool:
        return CUDAAccelerator.auto_device_count() > 0

    @staticmethod
    def name() -> str:
        return "cuda"

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """JAX's memory statistics of the GPU: ``bytes_in_use``, ``peak_bytes_in_use``, … in bytes."""
        return dict(of(device, "gpu").memory_stats() or {})

    @classmethod
    def register_accelerators(cls, accelerator_registry: AcceleratorRegistryType) -> None:
        for name in ("cuda", "gpu"):
            accelerator_registry.register(name, cls, description=cls.__name__, override=True)


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Indices of ``num_devices`` GPUs that JAX sees; -1: all.

    Raises:
        ValueError: there are fewer.
    """
    available = CUDAAccelerator.auto_device_count()
    if num_devices == 0:
        return []
    if num_devices > available or available == 0:
        raise ValueError(f"You requested to find {num_devices} devices but JAX sees {available} GPUs here.")
    return list(range(available if num_devices == -1 else num_devices))
