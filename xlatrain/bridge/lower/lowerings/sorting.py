"""Sorting and searching. NaN sorts as the greatest value, as in torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from xlatrain.bridge.lower.operands import Operand, along, is_float, promote
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype


def _sorted(x: jax.Array, dim: int, descending: bool) -> tuple[jax.Array, jax.Array]:
    """Values sorted along ``dim`` and their indices, in the shape of ``x``; stable in both directions."""
    wide, axis = along(x, dim)
    as_bool = wide.dtype == jnp.bool_
    keys = wide.astype(jnp.int8) if as_bool else wide
    places = lax.broadcasted_iota(jax_dtype(torch.int64), wide.shape, axis)
    if descending:  # ascending from the other end keeps equal elements in order
        keys, places = jnp.flip(keys, axis), jnp.flip(places, axis)
    values, indices = lax.sort((keys, places), dimension=axis, is_stable=True, num_keys=1)
    if descending:
        values, indices = jnp.flip(values, axis), jnp.flip(indices, axis)
    values = values.astype(jnp.bool_) if as_bool else values
    return values.reshape(x.shape), indices.reshape(x.shape)


@lowers("aten.sort.default")
def sort(x: jax.Array, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    return _sorted(x, dim, descending)


@lowers("aten.sort.stable")
def sort_stable(x: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """Always stable."""
    del stable
    return _sorted(x, dim, descending)


@lowers("aten.topk.default")
def topk(x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest (or smallest) elements, always sorted; of equal elements the first."""
    del sorted
    wide, axis = along(x, dim)
    if largest and is_float(x.dtype) and k > 0:
        # XLA ranks NaN by its sign bit, which 0 / 0 sets on x86.
        wide = jnp.where(jnp.isnan(wide), jnp.asarray(jnp.nan, wide.dtype), wide)
        values, indices = lax.top_k(jnp.moveaxis(wide, axis, -1), k)
        values, indices = jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)
    else:
        values, indices = (lax.slice_in_dim(part, 0, k, axis=axis) for part in _sorted(wide, axis, largest))
    return (values, indices) if x.ndim else (values.reshape(()), indices.reshape(()))


@lowers("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def searchsorted(
    sorted_sequence: jax.Array, x: Operand, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Search over the last dim; the leading dims of both must agree, or ``sorted_sequence`` has one dim."""
    del out_int32  # torch promised the dtype
    where = side or ("right" if right else "left")
    sequence, values = promote(sorted_sequence, x)
    if sequence.shape[-1] == 0 or values.size == 0:
        return jnp.zeros(values.shape, jnp.int32)
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, axis=-1)
    if sequence.ndim == 1:
        return jnp.searchsorted(sequence, values, side=where)
    rows = sequence.reshape(-1, sequence.shape[-1])
    queries = values.reshape(rows.shape[0], values.shape[-1])
    found = jax.vmap(lambda row, query: jnp.searchsorted(row, query, side=where))(rows, queries)
    return found.reshape(values.shape)


@lowers("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def bucketize(x: Operand, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False) -> jax.Array:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)
