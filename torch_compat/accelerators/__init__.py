"""Accelerators: one kind of hardware each. API: ``lightning.pytorch.accelerators`` 2.6, and of 1.3."""

from __future__ import annotations

import importlib

from torch_compat.accelerators.accelerator import Accelerator
from torch_compat.accelerators.cpu import CPUAccelerator
from torch_compat.accelerators.cuda import CUDAAccelerator, find_usable_cuda_devices
from torch_compat.accelerators.mps import MPSAccelerator
from torch_compat.accelerators.tpu import XLAAccelerator
from torch_compat.utilities.registry import AcceleratorRegistryType

AcceleratorRegistry = AcceleratorRegistryType()
for _kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator):
    _kind.register_accelerators(AcceleratorRegistry)

ACCELERATOR_REGISTRY = AcceleratorRegistry
"""Its name in ``lightning.fabric.accelerators``."""
_AcceleratorRegistry = AcceleratorRegistryType


def call_register_accelerators(registry: AcceleratorRegistryType, base_module: str) -> None:
    """Register the accelerators that the module ``base_module`` holds."""
    for kind in vars(importlib.import_module(base_module)).values():
        if isinstance(kind, type) and issubclass(kind, Accelerator) and kind is not Accelerator:
            kind.register_accelerators(registry)


GPUAccelerator = CUDAAccelerator
"""The name of eras 1.3 to 1.6."""

__all__ = [
    "Accelerator",
    "AcceleratorRegistry",
    "CPUAccelerator",
    "CUDAAccelerator",
    "GPUAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "find_usable_cuda_devices",
]
