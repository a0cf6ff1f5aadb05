"""Reductions over dims: sums, products, extremes, norms, truth values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xlatrain.bridge.lower.lowerings.conversion import convert
from xlatrain.bridge.lower.operands import Number, accumulate_dtype, along, canonical_dims, is_complex, is_float
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype

Dims = int | Sequence[int] | None


def summand(x: jax.Array, dtype: torch.dtype | None) -> jax.Array:
    """The terms of a sum, converted: to ``dtype``, or to int64 for integers and bools; 16-bit floats to float32."""
    if dtype is not None:
        x = convert(x, jax_dtype(dtype))
    elif not is_float(x.dtype) and not is_complex(x.dtype):
        x = x.astype(jax_dtype(torch.int64))
    return x.astype(accumulate_dtype(x.dtype))


@lowers("aten.sum.dim_IntList")
def sum_(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    return jnp.sum(summand(x, dtype), axis=canonical_dims(dim, x.ndim), keepdims=keepdim)


@lowers("aten.mean.default", "aten.mean.dim")
def mean(x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    """NaN over no elements."""
    dims = canonical_dims(dim, x.ndim)
    count = math.prod(x.shape[d] for d in dims)
    return sum_(x, dim, keepdim, dtype=dtype) / (float(count) or math.nan)  # a float: counts may be beyond int32


@lowers("aten.prod.default")
def prod(x: jax.Array, *, dtype: torch.dtype | None = None) -> jax.Array:
    return jnp.prod(summand(x, dtype))


@lowers("aten.prod.dim_int")
def prod_dim(x: jax.Array, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> jax.Array:
    return jnp.prod(summand(x, dtype), axis=canonical_dims(dim, x.ndim), keepdims=keepdim)


@lowers("aten.amax.default")
def amax(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    return jnp.max(x, axis=canonical_dims(dim, x.ndim), keepdims=keepdim)


@lowers("aten.amin.default")
def amin(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    return jnp.min(x, axis=canonical_dims(dim, x.ndim), keepdims=keepdim)


@lowers("aten.max.default")
def max_all(x: jax.Array) -> jax.Array:
    return jnp.max(x)


@lowers("aten.min.default")
def min_all(x: jax.Array) -> jax.Array:
    return jnp.min(x)


@lowers("aten.argmax.default")
def argmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """The first of equal maxima; NaN counts as the maximum. Without ``dim``: over the flattened tensor."""
    return _arg(jnp.argmax, x, dim, keepdim)


@lowers("aten.argmin.default")
def argmin(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """The first of equal minima; NaN counts as the minimum. Without ``dim``: over the flattened tensor."""
    return _arg(jnp.argmin, x, dim, keepdim)


def _arg(fn, x: jax.Array, dim: int | None, keepdim: bool) -> jax.Array:
    """The position that ``fn`` (an argmax or argmin) finds along ``dim``; of a scalar 0, as an integer."""
    if x.ndim == 0:
        return jnp.zeros((), jax_dtype(torch.int64))
    return fn(x, axis=dim, keepdims=keepdim)


@lowers("aten.max.dim")
def max_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return amax(x, dim, keepdim), argmax(x, dim, keepdim)


@lowers("aten.min.dim")
def min_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return amin(x, dim, keepdim), argmin(x, dim, keepdim)


@lowers("aten.any.default", "aten.any.dim", "aten.any.dims", "aten._is_any_true.default")
def any_(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    return jnp.any(x, axis=canonical_dims(dim, x.ndim), keepdims=keepdim)


@lowers("aten._is_all_true.default")
def all_(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    return jnp.all(x, axis=canonical_dims(dim, x.ndim), keepdims=keepdim)


def _moments(x: jax.Array, dims: tuple[int, ...], correction: Number | None) -> tuple[jax.Array, jax.Array]:
    """Variance and mean with kept dims, in at least float32. A divisor ``count - correction`` below 0 counts as 0."""
    wide = x.astype(accumulate_dtype(x.dtype))
    count = math.prod(x.shape[d] for d in dims)
    average = jnp.sum(wide, axis=dims, keepdims=True) / (float(count) or math.nan)
    squares = jnp.sum(jnp.square(jnp.abs(wide - average)), axis=dims, keepdims=True)
    divisor = max(0.0, count - float(1 if correction is None else correction))  # pyright: ignore[reportArgumentType]
    return squares / jnp.asarray(divisor, squares.dtype), average


def _kept(x: jax.Array, dims: tuple[int, ...], keepdim: bool) -> jax.Array:
    return x if keepdim else jnp.squeeze(x, axis=dims)


@lowers("aten.var.correction")
def var(x: jax.Array, dim: Dims = None, correction: Number | None = None, keepdim: bool = False) -> jax.Array:
    dims = canonical_dims(dim, x.ndim)
    return _kept(_moments(x, dims, correction)[0], dims, keepdim)


@lowers("aten.var_mean.correction")
def var_mean(
    x: jax.Array, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    dims = canonical_dims(dim, x.ndim)
    variance, average = _moments(x, dims, correction)
    return _kept(variance, dims, keepdim), _kept(average, dims, keepdim)


@lowers("aten.linalg_vector_norm.default")
def vector_norm(
    x: jax.Array, ord: Number = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    """``sum(|x|^ord)^(1/ord)``; ±inf: the largest or smallest ``|x|``; 0: how many are not zero."""
    dims = canonical_dims(dim, x.ndim)
    if dtype is not None:
        x = convert(x, jax_dtype(dtype))
    size = jnp.abs(x).astype(accumulate_dtype(jnp.abs(x).dtype))
    if ord == math.inf:
        return jnp.max(size, axis=dims, keepdims=keepdim)
    if ord == -math.inf:
        return jnp.min(size, axis=dims, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(size != 0, axis=dims, keepdims=keepdim).astype(size.dtype)
    if ord == 1:
        return jnp.sum(size, axis=dims, keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(size), axis=dims, keepdims=keepdim))
    return jnp.sum(size**ord, axis=dims, keepdims=keepdim) ** (1.0 / ord)


@lowers("aten.dist.default")
def dist(x: jax.Array, y: jax.Array, p: Number = 2) -> jax.Array:
    return vector_norm(x - y, p)


@lowers("aten.median.default")
def median(x: jax.Array) -> jax.Array:
    """The lower of two middle elements; NaN if there is any."""
    return median_dim(x.reshape(-1), 0)[0]


@lowers("aten.nanmedian.default")
def nanmedian(x: jax.Array) -> jax.Array:
    return nanmedian_dim(x.reshape(-1), 0)[0]


@lowers("aten.median.dim")
def median_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    wide, dim_ = along(x, dim)
    order = jnp.argsort(wide, axis=dim_, stable=True)  # NaN last
    n = wide.shape[dim_]
    values = jnp.take_along_axis(wide, order, axis=dim_)
    rank = jnp.full((), (n - 1) // 2)
    if is_float(x.dtype):
        some_nan = jnp.any(jnp.isnan(wide), axis=dim_, keepdims=True)
        first_nan = n - jnp.sum(jnp.isnan(wide), axis=dim_, keepdims=True)
        rank = jnp.where(some_nan, first_nan, rank)
    return _at_rank(x, values, order, rank, dim_, keepdim)


@lowers("aten.nanmedian.dim")
def nanmedian_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    wide, dim_ = along(x, dim)
    order = jnp.argsort(wide, axis=dim_, stable=True)
    values = jnp.take_along_axis(wide, order, axis=dim_)
    numbers = jnp.sum(~jnp.isnan(wide), axis=dim_, keepdims=True)
    return _at_rank(x, values, order, jnp.maximum(numbers - 1, 0) // 2, dim_, keepdim)


def _at_rank(
    x: jax.Array, values: jax.Array, order: jax.Array, rank: jax.Array, dim: int, keepdim: bool
) -> tuple[jax.Array, jax.Array]:
    """The value at ``rank`` of a dim sorted to ``values``, and its index in ``x``, which ``order`` tells.

    ``rank`` is an integer scalar, or an array that broadcasts over the other dims.
    """
    shape = [1 if d == dim else size for d, size in enumerate(values.shape)]
    rank = jnp.broadcast_to(rank, shape)
    value, index = jnp.take_along_axis(values, rank, axis=dim), jnp.take_along_axis(order, rank, axis=dim)
    if x.ndim == 0:
        return value.reshape(()), index.reshape(())
    return (value, index) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(index, dim))


@lowers("aten.kthvalue.default")
def kthvalue(x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    wide, dim_ = along(x, dim)
    order = jnp.argsort(wide, axis=dim_, stable=True)
    values = jnp.take_along_axis(wide, order, axis=dim_)
    return _at_rank(x, values, order, jnp.full((), k - 1), dim_, keepdim)


@lowers("aten.mode.default")
def mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The most frequent value, the smallest of equally frequent ones, and the index of its last occurrence."""
    wide, dim_ = along(x, dim)
    rows = jnp.moveaxis(wide, dim_, -1)
    counts = jnp.sum(rows[..., :, None] == rows[..., None, :], axis=-1)
    best = counts == jnp.max(counts, axis=-1, keepdims=True)
    largest = np.inf if is_float(rows.dtype) else True if rows.dtype == jnp.bool_ else np.iinfo(rows.dtype).max
    value = jnp.min(jnp.where(best, rows, jnp.asarray(largest, rows.dtype)), axis=-1, keepdims=True)
    index = rows.shape[-1] - 1 - jnp.argmax(jnp.flip(rows == value, -1), axis=-1, keepdims=True)
    if x.ndim == 0:
        return value.reshape(()), index.reshape(())
    value, index = jnp.moveaxis(value, -1, dim_), jnp.moveaxis(index, -1, dim_)
    return (value, index) if keepdim else (jnp.squeeze(value, dim_), jnp.squeeze(index, dim_))
