"""NVIDIA's GPUs. API: ``lightning.pytorch.accelerators.CUDAAccelerator``."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import torch

from torch_compat.accelerators.accelerator import Accelerator
from torch_compat.accelerators.jax_devices import indices, local_devices, of
from torch_compat.utilities.registry import AcceleratorRegistryType


class CUDAAccelerator(Accelerator):
    """The GPUs that JAX sees (the extra ``cuda``); torch itself need not have CUDA."""

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
        accelerator_registry.register("cuda", cls, description=cls.__name__, override=True)


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Indices of ``num_devices`` GPUs that JAX sees; -1: all.

    Raises:
        ValueError: there are fewer.
    """
    available = CUDAAccelerator.auto_device_count()
    if num_devices == 0:
        return []
    if num_devices > available or available == 0:
        raise ValueError(
            f"You requested to find {num_devices} devices but JAX sees {available} GPUs here: ask for at most that many"
        )
    return list(range(available if num_devices == -1 else num_devices))


def num_cuda_devices() -> int:
    """The GPUs that JAX sees."""
    return CUDAAccelerator.auto_device_count()


def is_cuda_available() -> bool:
    """Whether JAX sees a GPU."""
    return CUDAAccelerator.is_available()


def get_nvidia_gpu_stats(device: torch.device) -> dict[str, float]:
    """Statistics of one GPU from ``nvidia-smi``: use in percent, memory in MiB, fan, temperatures.

    Raises:
        FileNotFoundError: there is no ``nvidia-smi``.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise FileNotFoundError("nvidia-smi: command not found")
    names = [name for name, _ in _NVIDIA_STATS]
    index = torch.device(device).index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpu = visible.split(",")[index].strip() if visible else str(index)
    done = subprocess.run(
        [tool, f"--query-gpu={','.join(names)}", "--format=csv,nounits,noheader", f"--id={gpu}"],
        encoding="utf-8",
        capture_output=True,
        check=True,
    )
    values = [_number(text) for text in done.stdout.strip().split(", ")]
    return {f"{name} ({unit})": value for (name, unit), value in zip(_NVIDIA_STATS, values, strict=True)}


_NVIDIA_STATS = (
    ("utilization.gpu", "%"),
    ("memory.used", "MB"),
    ("memory.free", "MB"),
    ("utilization.memory", "%"),
    ("fan.speed", "%"),
    ("temperature.gpu", "°C"),
    ("temperature.memory", "°C"),
)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return 0.0
