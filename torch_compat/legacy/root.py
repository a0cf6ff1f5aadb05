"""The module ``pytorch_lightning``: ``torch_compat``, with base classes that accept hooks of every era."""

from __future__ import annotations

import importlib
from typing import Any

import torch_compat
from torch_compat.stock_names.removed_names import in_modules

__version__ = torch_compat.__version__

# Submodules are found by the alias finder, not on disk; a module without this attribute cannot have any.
__path__: list[str] = []

_HOMES = {"LightningModule": "torch_compat.legacy.module", "Callback": "torch_compat.legacy.callback"}
_SUBMODULES = {
    "plugins": "torch_compat.legacy.plugins",
    "core": "torch_compat.legacy.core",
    "callbacks": "torch_compat.legacy.callbacks",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    if (removed := in_modules(name)) is not None:
        raise AttributeError(removed)
    return getattr(torch_compat, name)


def __dir__() -> list[str]:
    return sorted({*dir(torch_compat), *_HOMES, *_SUBMODULES})
