"""``pytorch_lightning.callbacks``: today's callbacks; the base class accepts hooks of every era."""

from __future__ import annotations

from typing import Any

from torch_compat import callbacks
from torch_compat.legacy.callback import Callback
from torch_compat.stock_names.removed_names import in_modules

__path__: list[str] = []  # submodules are found by the alias finder
__all__ = sorted({"Callback", *callbacks.__all__})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if (removed := in_modules(f"callbacks.{name}")) is not None:
        raise AttributeError(removed)
    return Callback if name == "Callback" else getattr(callbacks, name)
