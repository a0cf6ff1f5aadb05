"""``pytorch_lightning.plugins``: today's plugins, and those of 1.3 to 1.5."""

from __future__ import annotations

from typing import Any

from torch_compat import plugins
from torch_compat.legacy import training_type
from torch_compat.legacy.precision_plugin import DoublePrecisionPlugin, NativeMixedPrecisionPlugin, PrecisionPlugin

__path__: list[str] = []  # submodules are found by the alias finder
_OWN = {kind.__name__: kind for kind in (DoublePrecisionPlugin, NativeMixedPrecisionPlugin, PrecisionPlugin)}
__all__ = sorted({*_OWN, *training_type.__all__, *plugins.__all__})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in {*training_type.__all__, *training_type._REFUSED}:
        return getattr(training_type, name)
    return getattr(plugins, name)
