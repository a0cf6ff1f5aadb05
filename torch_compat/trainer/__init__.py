"""The Trainer (``lightning.pytorch.trainer``)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.seed import seed_everything

__all__ = ["Trainer", "seed_everything"]

_HOMES = {"Trainer": "torch_compat.trainer.trainer", "seed_everything": "torch_compat.utilities.seed"}


def __getattr__(name: str) -> Any:
    # On first use: the parts of the Trainer import each other, and some are used without it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
