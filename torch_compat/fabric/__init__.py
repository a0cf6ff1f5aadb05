"""``lightning.fabric``: its utilities; ``Fabric`` itself is not offered in this version."""

from __future__ import annotations

import importlib
from typing import Any

_NOT_OFFERED = frozenset({"Fabric", "is_wrapped"})

__all__ = ["seed_everything"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "seed_everything":
        return importlib.import_module("torch_compat.utilities.seed").seed_everything
    if name == "utilities":
        return importlib.import_module("torch_compat.utilities")
    if name in _NOT_OFFERED:
        raise ImportError(
            f"`lightning.fabric.{name}` is not offered in this version of torch_compat: use `lightning.pytorch.Trainer`,"
            " or xlatrain's engine for a loop of your own."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "utilities"})
