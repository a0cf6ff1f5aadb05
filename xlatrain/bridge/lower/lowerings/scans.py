"""Cumulative operations along a dim."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xlatrain.bridge.lower.lowerings.reductions import summand
from xlatrain.bridge.lower.operands import accumulate_dtype, along, is_complex, is_float
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype


@lowers("aten.cumsum.default")
def cumsum(x: jax.Array, dim: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    terms, axis = along(summand(x, dtype), dim)
    return lax.cumsum(terms, axis).reshape(x.shape)


@lowers("aten.cumprod.default")
def cumprod(x: jax.Array, dim: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    terms, axis = along(summand(x, dtype), dim)
    return lax.cumprod(terms, axis).reshape(x.shape)


@lowers("aten.logcumsumexp.default")
def logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    terms, axis = along(x.astype(accumulate_dtype(x.dtype)), dim)
    if terms.size == 0:
        return terms.reshape(x.shape)
    if is_complex(x.dtype):
        return lax.associative_scan(jnp.logaddexp, terms, axis=axis).reshape(x.shape)
    return lax.cumlogsumexp(terms, axis).reshape(x.shape)


@lowers("aten.cummax.default")
def cummax(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running(x, dim, jnp.greater_equal)


@lowers("aten.cummin.default")
def cummin(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running(x, dim, jnp.less_equal)


def _running(x: jax.Array, dim: int, wins: Callable[..., jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The running winner along ``dim`` and its index, in the shape of ``x``: the latest of equal ones; NaN wins over numbers."""
    terms, axis = along(x, dim)
    places = lax.broadcasted_iota(jax_dtype(torch.int64), terms.shape, axis)

    def later(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (a, i), (b, j) = left, right
        take = wins(b, a)
        if is_float(x.dtype):
            take = (take & ~jnp.isnan(a)) | jnp.isnan(b)
        return jnp.where(take, b, a), jnp.where(take, j, i)

    if terms.size == 0:
        return x, places.reshape(x.shape)
    values, indices = lax.associative_scan(later, (terms, places), axis=axis)
    return values.reshape(x.shape), indices.reshape(x.shape)
