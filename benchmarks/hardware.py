"""The hardware on which a result was measured."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil


def describe() -> dict[str, str]:
    """CPU, cores, memory, Python and the versions that matter; nothing that names the machine."""
    return {
        "cpu": cpu_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        **gpus(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "jax", "jaxlib", "optax", "lightning")},
    }


def gpus() -> dict[str, str]:
    """The GPUs that NVIDIA's driver knows, with their memory and its version; nothing where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return {}
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip().splitlines()
    return {"gpu": "; ".join(found)} if found else {}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load() -> str:
    """Other work on the machine, as the load average of the last minute when measuring starts."""
    return f"{os.getloadavg()[0]:.1f}"
