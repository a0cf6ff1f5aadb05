"""Views that rearrange whole tensors: shapes, dims, expansion."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import canonical_dim, canonical_dims, integer
from xlatrain.bridge.lower.registry import lowers


@lowers(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten._reshape_copy.default",
    "aten.view_copy.default",
)
def view(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """Reshape ``x``; at most one size is -1, also for a tensor without elements."""
    sizes = [integer(s) for s in size]
    if -1 in sizes and x.size == 0:
        sizes[sizes.index(-1)] = 0
    return x.reshape(sizes)


@lowers("aten._reshape_alias.default")
def reshape_alias(x: jax.Array, size: Sequence[int], stride: Sequence[int]) -> jax.Array:
    """The strides only describe what a reshape gives."""
    del stride
    return view(x, size)


@lowers("aten.flatten.using_ints")
def flatten(x: jax.Array, start_dim: int = 0, end_dim: int = -1) -> jax.Array:
    start, end = canonical_dim(start_dim, x.ndim), canonical_dim(end_dim, x.ndim)
    return x.reshape(1) if x.ndim == 0 else x.reshape(*x.shape[:start], -1, *x.shape[end + 1 :])


@lowers("aten.expand.default", "aten.expand_copy.default")
def expand(x: jax.Array, size: Sequence[int], *, implicit: bool = False) -> jax.Array:
    """Broadcast to ``size``, where ``-1`` keeps a dim's size. ``implicit`` is a note of torch's tracer."""
    del implicit
    own = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [own[d] if s == -1 else integer(s) for d, s in enumerate(size)])


@lowers("aten.permute.default", "aten.permute_copy.default")
def permute(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.transpose(x, [canonical_dim(d, x.ndim) for d in dims])


@lowers("aten.transpose.int", "aten.transpose_copy.int")
def transpose(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowers("aten.t.default", "aten.t_copy.default")
def t(x: jax.Array) -> jax.Array:
    return x.T


@lowers("aten.squeeze.default", "aten.squeeze_copy.default")
def squeeze(x: jax.Array) -> jax.Array:
    return jnp.squeeze(x)


@lowers("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze_copy.dim", "aten.squeeze_copy.dims")
def squeeze_dims(x: jax.Array, dim: int | Sequence[int]) -> jax.Array:
    """Dims of another size than 1 stay."""
    if x.ndim == 0 or (not isinstance(dim, int) and len(dim) == 0):
        return x
    return jnp.squeeze(x, axis=tuple(d for d in canonical_dims(dim, x.ndim) if x.shape[d] == 1))


@lowers("aten.unsqueeze.default", "aten.unsqueeze_copy.default")
def unsqueeze(x: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(x, dim)


@lowers("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    rows, cols = x.shape[dim1], x.shape[dim2]
    if offset >= cols or -offset >= rows:
        rest = [size for d, size in enumerate(x.shape) if d not in (dim1 % x.ndim, dim2 % x.ndim)]
        return jnp.zeros((*rest, 0), x.dtype)
    return jnp.diagonal(x, offset, dim1, dim2)


@lowers("aten.unfold.default", "aten.unfold_copy.default")
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


@lowers("aten.roll.default")
def roll(x: jax.Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> jax.Array:
    """Roll along ``dims``; without ``dims``, the flattened tensor."""
    if len(dims) == 0:
        return jnp.roll(x, shifts[0] if len(shifts) else 0)
    return jnp.roll(x, tuple(shifts), tuple(dims)) if x.ndim else x


@lowers("aten.rot90.default")
def rot90(x: jax.Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> jax.Array:
    return jnp.rot90(x, k, tuple(dims))  # pyright: ignore[reportArgumentType]


@lowers("aten.repeat.default")
def repeat(x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    return jnp.tile(x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats))


@lowers("aten.repeat_interleave.self_int")
def repeat_interleave(x: jax.Array, repeats: int, dim: int | None = None, *, output_size: int | None = None) -> jax.Array:
    """``output_size`` only saves torch a computation."""
    del output_size
    return jnp.repeat(x.reshape(-1) if dim is None else x, repeats, axis=0 if dim is None else dim)
