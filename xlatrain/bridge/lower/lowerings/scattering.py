"""Writing and adding elements at places given by index tensors.

Where several writes hit one place, torch leaves open which one stays. What is written out of range (torch raises) is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.lower.lowerings.conversion import convert
from xlatrain.bridge.lower.lowerings.indexing import Indices, index_tuple
from xlatrain.bridge.lower.operands import Number, accumulate_dtype, along, cast, is_float, is_integer
from xlatrain.bridge.lower.registry import lowers

_IN_RANGE: Any = {"mode": "drop", "wrap_negative_indices": False}
"""For ops whose negative indices torch does not count from the end."""


def _bools_as_integers(lowering: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Accumulation of bools as torch does it, a sum being "any" and a product "all": XLA's scatter only adds numbers."""

    def widened(x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if x.dtype != jnp.bool_:
            return lowering(x, *args, **kwargs)
        # The last positional array is what is added; masks among the indices stay masks.
        last = max((i for i, arg in enumerate(args) if isinstance(arg, jax.Array)), default=-1)
        wide = [arg.astype(jnp.int32) if i == last else arg for i, arg in enumerate(args)]
        return lowering(x.astype(jnp.int32), *wide, **kwargs) != 0

    return widened


@lowers("aten.index_put.default")
@_bools_as_integers
def index_put(x: jax.Array, indices: Indices, values: jax.Array, accumulate: bool = False) -> jax.Array:
    masks = [index for index in indices if index is not None and index.dtype in (np.bool_, np.uint8)]
    if masks:
        return _mask_put(x, indices, values, accumulate)
    at = x.at[index_tuple(indices)]
    values = convert(values, x.dtype)
    return at.add(values, mode="drop") if accumulate else at.set(values, mode="drop")


def _mask_put(x: jax.Array, indices: Indices, values: jax.Array, accumulate: bool) -> jax.Array:
    """``x[mask] = values`` with a value that is the same for every True element.

    Raises:
        LoweringError: values of their own for the True elements, whose number is not known while compiling.
    """
    given = [index for index in indices if index is not None]
    mask, leading = given[0], next(i for i, index in enumerate(indices) if index is not None)
    trailing = x.ndim - leading - mask.ndim
    per_element = values.ndim > trailing and values.shape[values.ndim - trailing - 1] != 1
    if len(given) > 1 or per_element or (leading and values.ndim > trailing + 1):
        raise LoweringError(
            "writing a tensor to the places of a boolean mask needs the number of True elements, which XLA cannot know; "
            "use torch.where(mask, values, x) with values of x's shape, or x.masked_scatter(mask, values)"
        )
    mask = (mask != 0).reshape(*mask.shape, *(1,) * trailing)
    if values.ndim > trailing:
        values = values.reshape(values.shape[values.ndim - trailing :])
    values = convert(values, x.dtype)
    return jnp.where(mask, x + values if accumulate else values, x)


@lowers("aten._index_put_impl.default")
def index_put_impl(
    x: jax.Array, indices: Indices, values: jax.Array, accumulate: bool = False, unsafe: bool = False
) -> jax.Array:
    """``unsafe`` skips torch's range checks, which a compiled program has not."""
    del unsafe
    return index_put(x, indices, values, accumulate)


@lowers("aten.put.default")
@_bools_as_integers
def put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    """Put ``source`` into the flattened tensor, at ``index``."""
    at = x.reshape(-1).at[index.reshape(-1)]
    values = source.reshape(-1)
    return (at.add(values, mode="drop") if accumulate else at.set(values, mode="drop")).reshape(x.shape)


def _one_dim(x: jax.Array, dim: int, index: jax.Array) -> tuple[jax.Array, Any]:
    """``x`` with at least one dim, and the JAX index of whole slices ``index`` along ``dim``."""
    wide, axis = along(x, dim)
    return wide, (*(slice(None),) * axis, index.reshape(-1))


def _slices(source: jax.Array, x: jax.Array) -> jax.Array:
    return source.reshape(1) if source.ndim == 0 and x.ndim <= 1 else source


@lowers("aten.index_add.default")
@_bools_as_integers
def index_add(x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Number = 1) -> jax.Array:
    wide, at = _one_dim(x, dim, index)
    source = _slices(source, x)
    scaled = source if alpha == 1 else source * cast(alpha, source.dtype)
    return wide.at[at].add(scaled.astype(x.dtype), **_IN_RANGE).reshape(x.shape)


@lowers("aten.index_copy.default")
def index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    wide, at = _one_dim(x, dim, index)
    return wide.at[at].set(_slices(source, x), **_IN_RANGE).reshape(x.shape)


@lowers("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(x: jax.Array, dim: int, index: jax.Array, value: Number | jax.Array) -> jax.Array:
    wide, at = _one_dim(x, dim, index)
    return wide.at[at].set(cast(value, x.dtype), mode="drop").reshape(x.shape)


@lowers("aten.index_reduce.default")
@_bools_as_integers
def index_reduce(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    wide, at = _one_dim(x, dim, index)
    return _reduced(wide, at, _slices(source, x), reduce, include_self).reshape(x.shape)


def _grid(x: jax.Array, dim: int, index: jax.Array) -> tuple[jax.Array, ...]:
    """The full coordinates that torch's scatter writes to: the element's own, with ``index`` along ``dim``."""
    return tuple(index if d == dim else lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(x.ndim))


def _scatter(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, write: Callable[..., jax.Array], select: Callable[..., jax.Array]
) -> jax.Array:
    """``write(x.at[...], src)``; with one index per row as a select, which fuses and partitions where a scatter does neither."""
    if index.size == 0:
        return x
    wide, axis = along(x, dim)
    index, src = (a.reshape(1) if a.ndim == 0 else a for a in (index, src))
    src = src[tuple(slice(size) for size in index.shape)]
    whole = all(index.shape[d] == wide.shape[d] for d in range(wide.ndim) if d != axis)
    if index.shape[axis] == 1 and whole:
        here = lax.broadcasted_iota(index.dtype, wide.shape, axis) == index
        return jnp.where(here, select(wide, src), wide).reshape(x.shape)
    return write(wide.at[_grid(wide, axis, index)], src).reshape(x.shape)


@lowers("aten.scatter.src")
def scatter_src(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _scatter(x, dim, index, src, lambda at, s: at.set(s, **_IN_RANGE), lambda _, s: s)


@lowers("aten.scatter.value")
def scatter_value(x: jax.Array, dim: int, index: jax.Array, value: Number) -> jax.Array:
    return scatter_src(x, dim, index, jnp.broadcast_to(cast(value, x.dtype), index.shape))


@lowers("aten.scatter_add.default")
@_bools_as_integers
def scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _scatter(x, dim, index, src, lambda at, s: at.add(s, **_IN_RANGE), lambda old, s: old + s)


@lowers("aten.scatter.reduce")
@_bools_as_integers
def scatter_reduce_src(x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, reduce: str) -> jax.Array:
    if reduce == "add":
        return scatter_add(x, dim, index, src)
    return _scatter(x, dim, index, src, lambda at, s: at.multiply(s, **_IN_RANGE), lambda old, s: old * s)


@lowers("aten.scatter.value_reduce")
def scatter_reduce_value(x: jax.Array, dim: int, index: jax.Array, value: Number, *, reduce: str) -> jax.Array:
    return scatter_reduce_src(x, dim, index, jnp.broadcast_to(cast(value, x.dtype), index.shape), reduce=reduce)


@lowers("aten.scatter_reduce.two")
@_bools_as_integers
def scatter_reduce(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str, *, include_self: bool = True
) -> jax.Array:
    if index.size == 0:
        return x
    wide, axis = along(x, dim)
    index, src = (a.reshape(1) if a.ndim == 0 else a for a in (index, src))
    src = src[tuple(slice(size) for size in index.shape)]
    return _reduced(wide, _grid(wide, axis, index), src, reduce, include_self).reshape(x.shape)


def _reduced(x: jax.Array, at: Any, src: jax.Array, reduce: str, include_self: bool) -> jax.Array:
    """``src`` reduced into ``x`` at ``at``, in the dtype of ``x``.

    Without ``include_self`` the old values of places that are hit do not count.

    Raises:
        LoweringError: an unknown ``reduce``.
    """
    dtype = x.dtype
    wide = x.astype(accumulate_dtype(dtype))
    src = src.astype(wide.dtype)
    start = wide if include_self else wide.at[at].set(_identity(reduce, wide.dtype), **_IN_RANGE)
    if reduce in ("sum", "mean"):
        total = start.at[at].add(src, **_IN_RANGE)
        return (_mean(total, x, at, include_self) if reduce == "mean" else total).astype(dtype)
    if reduce == "prod":
        return start.at[at].multiply(src, **_IN_RANGE).astype(dtype)
    if reduce == "amax":
        return start.at[at].max(src, **_IN_RANGE).astype(dtype)
    if reduce == "amin":
        return start.at[at].min(src, **_IN_RANGE).astype(dtype)
    raise LoweringError(f"reduce={reduce!r} is unknown; expected sum, prod, mean, amax or amin")


def _mean(total: jax.Array, x: jax.Array, at: Any, include_self: bool) -> jax.Array:
    """The mean of what was summed to ``total`` at ``at``. Integer means round towards minus infinity, as in torch."""
    start = jnp.full(x.shape, 1 if include_self else 0, jnp.int32)
    count = jnp.maximum(start.at[at].add(1, **_IN_RANGE), 1).astype(total.dtype)
    return jnp.floor_divide(total, count) if is_integer(total.dtype) else total / count


def _identity(reduce: str, dtype: np.dtype) -> np.ndarray:
    """The value that leaves others unchanged under ``reduce``."""
    if reduce in ("sum", "mean"):
        return np.zeros((), dtype)
    if reduce == "prod":
        return np.ones((), dtype)
    if dtype == np.bool_:
        return np.asarray(reduce == "amin")
    low, high = (-np.inf, np.inf) if is_float(dtype) else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return np.asarray(low if reduce == "amax" else high).astype(dtype)
