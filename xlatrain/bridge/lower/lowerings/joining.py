"""Joining tensors and taking them apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import canonical_dim, promote
from xlatrain.bridge.lower.registry import lowers


def _common(tensors: Sequence[jax.Array]) -> list[jax.Array]:
    return list(promote(*tensors))


@lowers("aten.cat.default")
def cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """Concatenate; tensors of shape (0,) are skipped, whatever the shape of the others (torch's legacy rule)."""
    arrays = _common(tensors)
    kept = [x for x in arrays if x.shape != (0,)]
    return jnp.concatenate(kept, axis=dim) if kept else arrays[0]


def _pieces(x: jax.Array, sizes: Sequence[int], dim: int) -> tuple[jax.Array, ...]:
    """Slices of ``x`` along ``dim``, of ``sizes``, one behind the other."""
    axis = canonical_dim(dim, x.ndim)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(lax.slice_in_dim(x, at, at + size, axis=axis) for at, size in zip(starts, sizes, strict=True))


@lowers("aten.split_with_sizes.default")
def split_with_sizes(x: jax.Array, split_sizes: Sequence[int], dim: int = 0) -> tuple[jax.Array, ...]:
    return _pieces(x, split_sizes, dim)


@lowers("aten.split_copy.Tensor")
def split(x: jax.Array, split_size: int, dim: int = 0) -> tuple[jax.Array, ...]:
    length = x.shape[dim]
    if length == 0 or split_size == 0:
        return (x,)
    count = math.ceil(length / split_size)
    return _pieces(x, [min(split_size, length - i * split_size) for i in range(count)], dim)


@lowers("aten.unbind_copy.int")
def unbind(x: jax.Array, dim: int = 0) -> tuple[jax.Array, ...]:
    axis = canonical_dim(dim, x.ndim)
    return tuple(lax.index_in_dim(x, at, axis, keepdims=False) for at in range(x.shape[axis]))
