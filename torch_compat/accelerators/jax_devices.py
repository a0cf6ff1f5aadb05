"""JAX's devices, as accelerators count them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from torch_compat.utilities.exceptions import MisconfigurationException


def local_devices(platform: str) -> list[Any]:
    """The devices of a JAX platform in this process; empty where JAX has none. Starts JAX."""
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:
        return []


def indices(devices: object, available: int, what: str) -> list[int]:
    """``Trainer(devices=…)`` as indices of an accelerator's devices.

    Args:
        devices: a number, -1 or ``"-1"`` or ``"auto"`` for all, ``"0,2"``, or a list of indices.
        available: how many there are.
        what: their kind, for messages.

    Raises:
        MisconfigurationException: another kind of value, or devices that are not there.
    """
    wanted = _wanted(devices, available)
    if wanted is None:
        raise MisconfigurationException(f"devices={devices!r}: expected a positive number, a list of indices, 'auto' or -1")
    if missing := [index for index in wanted if not 0 <= index < available]:
        raise MisconfigurationException(f"devices={devices!r}: there is no {what} {missing}; JAX sees {available} here")
    return wanted


def _wanted(devices: object, available: int) -> list[int] | None:
    if devices in ("auto", -1, "-1"):
        return list(range(available))
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if not parts or not all(part.isdigit() for part in parts):
            return None
        return list(range(int(parts[0]))) if len(parts) == 1 and "," not in devices else [int(part) for part in parts]
    if isinstance(devices, bool) or devices is None:
        return None
    if isinstance(devices, int):
        return list(range(devices)) if devices > 0 else None
    if isinstance(devices, Sequence) and devices and len(set(devices)) == len(devices):
        return [int(index) for index in devices]
    return None


def of(device: torch.device | str | int, platform: str) -> Any:
    """The JAX device behind a torch device of an accelerator, by its index.

    Raises:
        MisconfigurationException: JAX sees fewer.
    """
    index = device if isinstance(device, int) else (torch.device(device).index or 0)
    found = local_devices(platform)
    if index >= len(found):
        raise MisconfigurationException(f"device {device!r}: JAX sees {len(found)} {platform} device(s) here")
    return found[index]
