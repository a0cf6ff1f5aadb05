"""Compiled steps for stock Lightning's own Trainer (2.6): ``Trainer(strategy=xlatrain.lightning.MeshStrategy(...))``.

What is behind it belongs to the facade, which stands above this package: it is named here, and imported when it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"MeshStrategy": "torch_compat.stock_trainer"}


def __getattr__(name: str) -> Any:
    """Raises:
    ImportError: stock Lightning is not installed, or another release, or ``lightning`` is torch_compat in this process.
    """
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
