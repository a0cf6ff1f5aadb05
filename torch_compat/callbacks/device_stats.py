"""Numbers about this host and its XLA devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psutil


def cpu_stats() -> dict[str, float]:
    """Use of this host's processors, memory and swap, in percent."""
    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }


def memory_stats(devices: Iterable[Any]) -> dict[str, float]:
    """Statistics of JAX devices' allocators (``bytes_in_use``, ``peak_bytes_in_use``, ...), by ``<name>.<platform>:<id>``."""
    stats: dict[str, float] = {}
    for device in devices:
        # None where the platform keeps no count, as on CPU.
        for name, value in (device.memory_stats() or {}).items():
            stats[f"{name}.{device.platform}:{device.id}"] = value
    return stats
