"""Decompositions of ``as_strided`` and related ops into reads and writes of the flat tensor behind a dense one.

XLA values have no strides, so these ops are rewritten while PyTorch captures, when the strides are still known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xlatrain.bridge.errors import LoweringError

aten = torch.ops.aten


def strided_decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The decompositions of ``as_strided``, its copy and scatter, and ``resize``."""
    return {
        aten.as_strided.default: as_strided,
        aten.as_strided_copy.default: as_strided,
        aten.as_strided_scatter.default: as_strided_scatter,
        aten.resize.default: resize,
    }


def _memory_order(x: torch.Tensor, size: Sequence[int] = (), stride: Sequence[int] = (), offset: int | None = None) -> list[int]:
    """The dims of ``x`` from the slowest to the fastest in memory.

    Args:
        size, stride, offset: of the view of its memory that is wanted; no offset: of all of it.

    Raises:
        LoweringError: the view reaches elements that ``x``, a view of a part of its memory, does not have.
    """
    order = sorted(range(x.ndim), key=lambda d: (-x.stride(d), -x.shape[d], d))
    expected, within = 1, True
    for d in reversed(order):
        within &= x.shape[d] == 1 or x.stride(d) == expected
        expected *= x.shape[d]
    first = int(x.storage_offset())
    if offset is None:
        within &= first == 0 and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    elif math.prod(size):
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        within &= first <= offset and last < first + x.numel()
    if not within and x.numel() > 0:
        raise LoweringError(
            f"as_strided of a view (shape {tuple(x.shape)}, strides {x.stride()}, offset {x.storage_offset()}) reads memory that "
            "belongs to another tensor, which XLA values do not share; call .contiguous() first, or use slicing, unfold or expand"
        )
    return order


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x`` in the order of its memory."""
    return x.permute(_memory_order(x)).reshape(-1)


def _reached(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> tuple[torch.Tensor, list[int], int]:
    """The elements of ``x`` in the order of its memory, the order of its dims, and where in there the strided view begins."""
    first = int(x.storage_offset())
    offset = first if storage_offset is None else storage_offset
    order = _memory_order(x, size, stride, offset)
    return x.permute(order).reshape(-1), order, offset - first


def _places(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """The index into memory of every element of the strided view, flat."""
    places = torch.full([], offset, dtype=torch.int64, device=x.device)
    for length, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(length, device=x.device) * step
    return places.reshape(-1)


def _is_run(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True where the strided view is one contiguous run of memory."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> torch.Tensor:
    """A slice where the view is one run of memory, else a gather."""
    flat, _, offset = _reached(x, size, stride, storage_offset)
    if _is_run(size, stride):
        return flat[offset : offset + math.prod(size)].reshape(size)
    return flat.index_select(0, _places(x, size, stride, offset)).reshape(size)


def as_strided_scatter(
    x: torch.Tensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """``x`` with the strided view of it replaced by ``src``."""
    flat, order, offset = _reached(x, size, stride, storage_offset)
    if _is_run(size, stride):
        changed = flat.slice_scatter(src.reshape(-1), 0, offset, offset + math.prod(size))
    else:
        changed = flat.index_put((_places(x, size, stride, offset),), src.reshape(-1))
    inverse = sorted(range(x.ndim), key=lambda d: order[d])
    return changed.reshape([x.shape[d] for d in order]).permute(inverse)


def resize(x: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """The leading elements in memory; what torch leaves uninitialised is zero.

    Raises:
        LoweringError: a memory format other than contiguous.
    """
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise LoweringError(f"resize_(memory_format={memory_format}) is not supported: XLA values have no memory format")
    flat, count = _flat(x), math.prod(size)
    if count > flat.numel():
        flat = torch.cat([flat, flat.new_zeros(count - flat.numel())])
    return flat[:count].reshape(size)
