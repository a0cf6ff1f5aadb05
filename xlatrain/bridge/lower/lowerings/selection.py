"""Choosing between values element by element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.bridge.lower.operands import Operand, cast, is_integer, promote, result_dtype
from xlatrain.bridge.lower.registry import lowers


@lowers("aten.where.self")
def where(condition: jax.Array, x: Operand, y: Operand) -> jax.Array:
    return jnp.where(condition != 0, *promote(x, y))


@lowers("aten.clamp.default", "aten.clamp.Tensor")
def clamp(x: jax.Array, min: Operand | None = None, max: Operand | None = None) -> jax.Array:
    """NaN in any operand gives NaN; ``max`` wins where ``min > max``."""
    dtype = result_dtype(*(operand for operand in (x, min, max) if operand is not None))
    y = x.astype(dtype)
    if min is not None:
        y = jnp.maximum(y, _bound(min, dtype))
    return jnp.minimum(y, _bound(max, dtype)) if max is not None else y


def _bound(value: Operand, dtype: np.dtype) -> jax.Array:
    """The limit of a clamp as a scalar of ``dtype``; a limit beyond the integers of ``dtype`` limits nothing."""
    if isinstance(value, int) and is_integer(dtype):
        info = np.iinfo(dtype)
        value = int(np.clip(value, info.min, info.max)) if dtype.itemsize >= 4 else value
    return cast(value, dtype)


@lowers("aten.masked_scatter.default")
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """The elements of ``source``, in order, where ``mask`` is True. Static: each True takes the element of its rank."""
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    x, mask = jnp.broadcast_to(x, shape), jnp.broadcast_to(mask, shape)
    if source.size == 0:
        return x
    rank = jnp.cumsum(mask.reshape(-1)) - 1
    taken = source.reshape(-1).at[rank].get(mode="clip").reshape(shape)
    return jnp.where(mask, taken, x)


@lowers("aten.masked_scatter_backward.default")
def masked_scatter_backward(grad: jax.Array, mask: jax.Array, sizes: list[int]) -> jax.Array:
    """The gradients at the True places, in order, followed by zeros."""
    size = int(np.prod(sizes))
    mask = jnp.broadcast_to(mask, grad.shape).reshape(-1)
    place = jnp.where(mask, jnp.cumsum(mask) - 1, size)
    return jnp.zeros(size, grad.dtype).at[place].set(grad.reshape(-1), mode="drop").reshape(sizes)
