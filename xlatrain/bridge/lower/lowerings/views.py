"""Views that rearrange whole tensors: shapes, dims, expansion."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import canonical_dim, canonical_dims, integer
from xlatrain.bridge.lower.registry import lowers


@lowers("aten.view.default", "aten._unsafe_view.default", "aten._reshape_copy.default", "aten.view_copy.default")
def view(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """Reshape ``x``; at most one size is -1, also for a tensor without elements."""
    sizes = [integer(s) for s in size]
    if -1 in sizes and x.size == 0:
        sizes[sizes.index(-1)] = 0
    return x.reshape(sizes)


@lowers("aten.expand.default")
def expand(x: jax.Array, size: Sequence[int], *, implicit: bool = False) -> jax.Array:
    """Broadcast to ``size``, where ``-1`` keeps a dim's size. ``implicit`` is a note of torch's tracer."""
    del implicit
    own = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [own[d] if s == -1 else integer(s) for d, s in enumerate(size)])


@lowers("aten.permute.default", "aten.permute_copy.default")
def permute(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.transpose(x, [canonical_dim(d, x.ndim) for d in dims])


@lowers("aten.transpose.int")
def transpose(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowers("aten.t.default")
def t(x: jax.Array) -> jax.Array:
    return x.T


@lowers("aten.squeeze.dims")
def squeeze_dims(x: jax.Array, dim: int | Sequence[int]) -> jax.Array:
    """Dims of another size than 1 stay."""
    if x.ndim == 0 or (not isinstance(dim, int) and len(dim) == 0):
        return x
    return jnp.squeeze(x, axis=tuple(d for d in canonical_dims(dim, x.ndim) if x.shape[d] == 1))


@lowers("aten.unsqueeze.default")
def unsqueeze(x: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(x, dim)


@lowers("aten.diagonal.default")
def diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    rows, cols = x.shape[dim1], x.shape[dim2]
    if offset >= cols or -offset >= rows:
        rest = [size for d, size in enumerate(x.shape) if d not in (dim1 % x.ndim, dim2 % x.ndim)]
        return jnp.zeros((*rest, 0), x.dtype)
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers("aten.unfold.default")
def unfold(x: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    """Windows of ``size`` elements every ``step`` along a dim; the window's elements become the last dim."""
    if x.ndim == 0:
        return jnp.broadcast_to(x, (size,))
    dim = canonical_dim(dimension, x.ndim)
    count = (x.shape[dim] - size) // step + 1
    parts = [lax.slice_in_dim(x, at, at + (count - 1) * step + 1, step, axis=dim) for at in range(size)]
    return jnp.stack(parts, axis=-1) if parts else jnp.zeros((*x.shape[:dim], count, *x.shape[dim + 1 :], 0), x.dtype)


@lowers("aten.flip.default")
def flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.flip(x, [canonical_dim(d, x.ndim) for d in dims]) if x.ndim and len(dims) else x


@lowers("aten.repeat.default")
def repeat(x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))
