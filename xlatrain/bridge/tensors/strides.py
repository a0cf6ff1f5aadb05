"""Strides of tensors that are not contiguous, which are all that arrays of XLA lack to stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Strides = tuple[int, ...]
Geometry = tuple[tuple[int, ...], Strides, int]
"""The shape, strides and offset of a tensor in its memory."""


def strides_of(tensor: torch.Tensor) -> Strides | None:
    """The strides of a tensor that is not contiguous, or is an image with other strides than such ones have; else None.

    Where one channel or images of one pixel make two orders the same, torch tells by these how a convolution's result shall lie.
    None, too, for a tensor that is not dense.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided:
            return None
        strides = tensor.stride()
        if tensor.is_contiguous() and (tensor.dim() not in (4, 5) or strides == contiguous_strides(tensor.shape)):
            return None
        return strides


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """The strides that torch gives a new tensor."""
    found, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        found[dim], step = step, step * max(1, shape[dim])
    return tuple(found)


def channels_last_strides(shape: Sequence[int]) -> Strides:
    """The strides that torch gives a new tensor in the order of ``channels_last``, of images or of volumes."""
    order = (0, *range(2, len(shape)), 1)
    found = dict(zip(order, contiguous_strides([shape[dim] for dim in order]), strict=True))
    return tuple(found[dim] for dim in range(len(shape)))


def memory_order(strides: Strides) -> tuple[int, ...]:
    """The dims of a tensor from the fastest to the slowest in memory."""
    return tuple(sorted(range(len(strides)), key=lambda dim: (strides[dim], -dim)))


def dense_strides(shape: Sequence[int], like: Strides) -> Strides:
    """The strides of a tensor without gaps whose dims lie in memory in the order of those with the strides ``like``."""
    found, step = [0] * len(shape), 1
    for dim in memory_order(like):
        found[dim], step = step, step * max(1, shape[dim])
    return tuple(found)


def empty(shape: Sequence[int], dtype: torch.dtype, strides: Strides | None, device: str | None = None) -> torch.Tensor:
    """A tensor of this geometry, its values whatever they are; contiguous for the strides None."""
    if strides is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.empty_strided(tuple(shape), strides, dtype=dtype, device=device)


def with_strides(tensor: torch.Tensor, strides: Strides) -> torch.Tensor:
    """A tensor of the same values with these strides; elements to which they give one memory have one value."""
    found = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    if found.untyped_storage().nbytes() == tensor.nbytes:
        return found.copy_(tensor)
    memory = found.as_strided((found.untyped_storage().nbytes() // found.itemsize,), (1,))
    places = torch.arange(len(memory)).as_strided(tensor.shape, strides)
    memory[places.reshape(-1)] = tensor.reshape(-1)
    return found


def geometry_of(tensor: torch.Tensor, root: torch.Tensor | None = None) -> Geometry:
    """The geometry of a tensor in its memory; with ``root``, another tensor there, from where that begins."""
    offset = tensor.storage_offset() - (0 if root is None else root.storage_offset())
    return tuple(tensor.shape), tensor.stride(), offset  # pyright: ignore[reportReturnType]  sizes of captures are numbers


def view_of(root: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The view of ``root`` with this geometry, from where it begins."""
    shape, strides, offset = geometry
    return root.as_strided(shape, strides, root.storage_offset() + offset)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor shows all of its memory, each element once."""
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes() and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    step = 1
    for dim in memory_order(tensor.stride()):
        if tensor.shape[dim] != 1:
            if tensor.stride()[dim] != step:
                return False
            step *= tensor.shape[dim]
    return True


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common, or may have where that takes long to tell."""
    return meet(geometry_of(one), geometry_of(other), one.itemsize, other.itemsize)


def meet(one: Geometry, other: Geometry, size: int, of_other: int | None = None) -> bool:
    """:func:`overlap` for tensors of these geometries, whose elements take ``size`` bytes."""
    try:
        return np.shares_memory(_memory(one, size), _memory(other, of_other or size), max_work=10_000)  # pyright: ignore[reportArgumentType]  numpy's stub has 0 and -1
    except np.exceptions.TooHardError:
        return True


def _memory(geometry: Geometry, size: int) -> np.ndarray:
    """An array of a geometry that has no memory, which must not be read."""
    shape, strides, offset = geometry
    place: dict[str, Any] = {"data": ((1 << 40) + offset * size, True), "typestr": f"|V{size}", "version": 3}
    place.update(shape=shape, strides=tuple(step * size for step in strides))
    return np.asarray(SimpleNamespace(__array_interface__=place))
