"""Helpers for users of the facade (``lightning.pytorch.utilities``); each is imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AttributeDict": "data",
    "CombinedLoader": "combined_loader",
    "GradClipAlgorithmType": "enums",
    "LightningEnum": "enums",
    "Throughput": "torch_compat.accelerators.throughput",
    "ThroughputMonitor": "torch_compat.accelerators.throughput",
    "disable_possible_user_warnings": "warnings",
    "find_shared_parameters": "parameter_tying",
    "grad_norm": "grads",
    "is_picklable": "parsing",
    "is_shared_filesystem": "shared_filesystem",
    "measure_flops": "flops",
    "move_data_to_device": "device_transfer",
    "rank_zero_deprecation": "rank_zero",
    "rank_zero_info": "rank_zero",
    "rank_zero_only": "rank_zero",
    "rank_zero_warn": "rank_zero",
    "set_shared_parameters": "parameter_tying",
    "suggested_max_num_workers": "data",
}

FLOAT16_EPSILON = 2.0**-10
FLOAT32_EPSILON = 2.0**-23
FLOAT64_EPSILON = 2.0**-52

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]  # one of our modules, or one of this package
    value = getattr(importlib.import_module(home if "." in home else f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
