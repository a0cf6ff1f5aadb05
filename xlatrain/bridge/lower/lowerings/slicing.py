"""Slices of a tensor, and a tensor with a slice replaced.

The scatters are written as selects between the tensor and the padded source: XLA miscompiles consecutive static
``.at[...].set`` on sharded arrays, and a select fuses and partitions without communication.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.lowerings.conversion import convert
from xlatrain.bridge.lower.operands import canonical_dim
from xlatrain.bridge.lower.registry import lowers


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Python's slice bounds for a positive step, with torch's int64 maximum as "to the end"."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


@lowers("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> jax.Array:
    axis = canonical_dim(dim, x.ndim)
    first, last = _bounds(x.shape[axis], start, end)
    return lax.slice_in_dim(x, first, last, step, axis)


@lowers("aten.narrow_copy.default")
def narrow(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    axis = canonical_dim(dim, x.ndim)
    first = start + x.shape[axis] if start < 0 else start
    return lax.slice_in_dim(x, first, first + length, 1, axis)


@lowers("aten.select.int", "aten.select_copy.int")
def select(x: jax.Array, dim: int, index: int | jax.Array) -> jax.Array:
    axis = canonical_dim(dim, x.ndim)
    return lax.index_in_dim(x, index, axis, keepdims=False) if isinstance(index, int) else jnp.take(x, index, axis)


@lowers("aten.slice_scatter.default")
def slice_scatter(
    x: jax.Array, src: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    axis = canonical_dim(dim, x.ndim)
    size = x.shape[axis]
    first, last = _bounds(size, start, end)
    src = convert(src, x.dtype)
    count = len(range(first, last, step))
    if count == 0:
        return x
    src = jnp.broadcast_to(src, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
    if count == size:
        return src
    past = first + (count - 1) * step + 1
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (first, size - past, step - 1)
    placed = lax.pad(src, jnp.zeros((), x.dtype), padding)
    at = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    inside = (at >= first) & (at < past)
    if step > 1:
        inside &= (at - first) % step == 0
    return jnp.where(inside, placed, x)


@lowers("aten.diagonal_scatter.default")
def diagonal_scatter(x: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    row_axis, col_axis = canonical_dim(dim1, x.ndim), canonical_dim(dim2, x.ndim)
    moved = jnp.moveaxis(x, (row_axis, col_axis), (-2, -1))
    rows, cols = moved.shape[-2:]
    src = convert(src, x.dtype)
    if src.shape[-1] == 0:
        return x
    at_row = lax.broadcasted_iota(jnp.int32, (rows, cols), 0)
    at_col = lax.broadcasted_iota(jnp.int32, (rows, cols), 1)
    # The k-th element of the diagonal lies in row k (offset >= 0) or in column k (offset < 0).
    size = rows if offset >= 0 else cols
    padded = jnp.pad(src, [(0, 0)] * (src.ndim - 1) + [(0, size - src.shape[-1])])
    spread = padded[..., :, None] if offset >= 0 else padded[..., None, :]
    return jnp.moveaxis(jnp.where(at_col - at_row == offset, spread, moved), (-2, -1), (row_axis, col_axis))
