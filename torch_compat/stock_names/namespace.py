"""The module ``lightning``: Lightning's root package, with ``L.pytorch`` and ``L.fabric``."""

from __future__ import annotations

import importlib
from typing import Any

import torch_compat
from torch_compat.stock_names.aliases import with_submodules

__version__ = torch_compat.__version__

# Submodules are found by the alias finder, not on disk; a module without this attribute cannot have any.
__path__: list[str] = []

_HOMES = {
    "Callback": "torch_compat",
    "Fabric": "torch_compat.fabric",
    "LightningDataModule": "torch_compat",
    "LightningModule": "torch_compat",
    "Trainer": "torch_compat",
    "seed_everything": "torch_compat",
}
_SUBMODULES = {"pytorch": "torch_compat", "fabric": "torch_compat.fabric"}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _SUBMODULES:
        return with_submodules(importlib.import_module(_SUBMODULES[name]))
    raise AttributeError(f"module 'lightning' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
