"""Strides of tensors that are not contiguous, which are all that arrays of XLA lack to stand for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Strides = tuple[int, ...]


def strides_of(tensor: torch.Tensor) -> Strides | None:
    """The strides of a tensor that is not contiguous; None for one that is, and for one that is not dense."""
    with torch._C.DisableTorchFunctionSubclass():
        return None if tensor.layout != torch.strided or tensor.is_contiguous() else tensor.stride()


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
