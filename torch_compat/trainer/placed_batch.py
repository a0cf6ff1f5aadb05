"""A batch on the mesh, and what of it a program depends on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_compat.functional.batches import BatchSpec
from xlatrain.rows import Rows


class PlacedBatch(NamedTuple):
    """A batch on the mesh.

    Attributes:
        arrays: one per tensor of the batch; global, dim 0 padded to divide the mesh.
        spec: puts tensors back into the user's batch.
        rows: which rows are real.
        split: for each array whether dim 0 is split over the mesh.
        shapes: global shape (real rows only) and torch dtype of each tensor.
    """

    arrays: list[Any]
    spec: BatchSpec
    rows: Rows
    split: tuple[bool, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def size(self) -> int:
        """Rows of the global batch."""
        return self.rows.size

    def key(self) -> Hashable:
        """What a program depends on."""
        return self.shapes, self.rows, self.split, self.spec, tuple(map(_number, self.spec.others))

    def describe(self) -> str:
        names = self.spec.names()
        return ", ".join(
            f"{name}: {str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
            for name, (shape, dtype) in zip(names, self.shapes, strict=True)
        )


def _number(leaf: Any) -> Hashable:
    """What a program may have baked in of a leaf that is no tensor: numbers. Strings and ids pass through."""
    if isinstance(leaf, np.ndarray | np.generic):
        return None if leaf.dtype.kind in "OSU" else (leaf.shape, leaf.dtype.str, leaf.tobytes())
    return leaf if isinstance(leaf, bool | int | float) else None
