"""``lightning.fabric``: a training loop in the user's hands, on the mesh."""

from __future__ import annotations

from typing import Any

from torch_compat.stock_names.first_import import first_import

_HOMES = {
    "Fabric": "torch_compat.fabric.fabric",
    "disable_possible_user_warnings": "torch_compat.utilities.warnings",
    "is_wrapped": "torch_compat.fabric.wrappers",
    "seed_everything": "torch_compat.utilities.seed",
}
_SUBMODULES = {
    **{name: f"torch_compat.{name}" for name in ("accelerators", "plugins", "utilities")},
    "loggers": "torch_compat.fabric.loggers",
}

__all__ = ["Fabric", "is_wrapped", "seed_everything"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(first_import(_HOMES[name]), name)
    if name in _SUBMODULES:
        return first_import(_SUBMODULES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
