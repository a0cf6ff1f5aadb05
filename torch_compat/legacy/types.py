"""``pytorch_lightning.utilities.types``: today's type names, and 1.x's names for the inputs of ``*_epoch_end`` hooks."""

from __future__ import annotations

from typing import Any

from torch_compat.utilities import types
from torch_compat.utilities.types import *  # noqa: F403
from torch_compat.utilities.types import STEP_OUTPUT

EPOCH_OUTPUT = list[STEP_OUTPUT]

__all__ = ["EPOCH_OUTPUT", *types.__all__]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return getattr(types, name)
