"""Meshes, how arrays are split over them, and how batches reach them. What :mod:`xlatrain.mesh.mesh` defines is here, too."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlatrain.mesh.mesh import (
        AXES,
        DATA_AXES,
        SEQUENCE_AXIS,
        axes_over_slices,
        batch_axes,
        data_parallel_size,
        is_multiprocess,
        make_mesh,
        platform,
        sequence_parts,
    )

__all__ = [
    "AXES",
    "DATA_AXES",
    "SEQUENCE_AXIS",
    "axes_over_slices",
    "batch_axes",
    "data_parallel_size",
    "is_multiprocess",
    "make_mesh",
    "platform",
    "sequence_parts",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("xlatrain.mesh.mesh"), name)  # when it is asked for: it imports jax
