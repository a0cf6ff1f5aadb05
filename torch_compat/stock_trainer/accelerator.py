"""JAX's devices as an accelerator of stock Lightning's."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import jax
import torch
from lightning.pytorch.accelerators import Accelerator

from torch_compat.stock_trainer.stock import refuse
from torch_compat.trainer.devices import find_devices


class JaxAccelerator(Accelerator):
    """All devices of JAX's default platform, which one process drives; ``JAX_PLATFORMS`` chooses another.

    User code keeps its tensors on the CPU: they go to the devices with a step.
    """

    def setup_device(self, device: torch.device) -> None:
        """JAX has its devices."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Memory in use on the first device, in bytes, as its backend counts it; empty where it does not."""
        return dict(jax.local_devices()[0].memory_stats() or {})

    def teardown(self) -> None:
        """JAX keeps its devices."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """A count, or a list of indices."""
        if isinstance(devices, str):
            return [int(one) for one in devices.split(",")] if "," in devices else int(devices)
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """A device of torch's for each of the mesh, with its index."""
        found = len(jax_devices(devices))
        return [torch.device("cpu", index) for index in (devices if isinstance(devices, list) else range(found))]

    @staticmethod
    def auto_device_count() -> int:
        """All of them."""
        return len(jax_devices("auto"))

    @staticmethod
    def is_available() -> bool:
        """JAX always has a device."""
        return True

    @staticmethod
    def name() -> str:
        return "jax"


def jax_devices(devices: Any) -> list[Any]:
    """JAX's devices for ``Trainer(devices=…)``.

    Raises:
        MisconfigurationException: fewer than asked for; or this is one of several processes.
    """
    found = find_devices(None, devices, 1)
    if jax.process_count() > 1:
        raise refuse(
            f"a run of {jax.process_count()} processes",
            "stock's loops, samplers and checkpoints know nothing of a mesh that spans processes",
        )
    _tell_python_of_ignored_signals()
    return found


def _tell_python_of_ignored_signals() -> None:
    """Let Python know that SIGPROF is ignored, where a backend of JAX's has done that behind its back.

    libtpu has timers that send SIGPROF, and ignores it. Stock's Trainer puts back, at the end of a run, how Python believes that
    signals are handled: by default this one ends the process.
    """
    status = Path("/proc/self/status")
    if threading.current_thread() is not threading.main_thread() or not status.exists():
        return
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    ignored = int(lines.get("SigIgn", "0"), 16) >> (signal.SIGPROF - 1) & 1
    if ignored and signal.getsignal(signal.SIGPROF) is signal.SIG_DFL:
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
