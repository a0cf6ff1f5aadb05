"""Histograms of static shape."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xlatrain.bridge.lower.operands import Number, accumulate_dtype
from xlatrain.bridge.lower.registry import lowers


def _count(x: jax.Array, edges: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Weights per bin, (bins,), of ``x`` (n,), given ``edges`` (bins + 1,).

    Bins are half open, the last one is closed. Values outside, and NaN, are not counted.
    """
    bins = edges.shape[0] - 1
    place = jnp.searchsorted(edges, x, side="right") - 1
    place = jnp.where(x == edges[-1], bins - 1, place)
    inside = (x >= edges[0]) & (x <= edges[-1])
    ones = jnp.ones(x.shape, edges.dtype) if weight is None else weight.reshape(-1)
    return jnp.zeros(bins, ones.dtype).at[jnp.where(inside, place, bins)].add(ones, mode="drop")


def _data_range(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest element, scalars of at least float32 for floats."""
    dtype = accumulate_dtype(x.dtype)
    return jnp.min(x).astype(dtype), jnp.max(x).astype(dtype)


def _widened(first: jax.Array, last: jax.Array, margin: float) -> tuple[jax.Array, jax.Array]:
    """The range, widened by ``margin`` on both sides where it is empty."""
    same = first == last
    return jnp.where(same, first - margin, first), jnp.where(same, last + margin, last)


@lowers("aten.histc.default")
def histc(x: jax.Array, bins: int = 100, min: Number = 0, max: Number = 0) -> jax.Array:
    """Counts between ``min`` and ``max``, which are the data's where both are equal."""
    dtype = accumulate_dtype(x.dtype)
    given = jnp.asarray(min, dtype), jnp.asarray(max, dtype)
    first, last = _widened(*(_data_range(x) if min == max and x.size else given), margin=1.0)
    flat = x.reshape(-1).astype(first.dtype)
    place = jnp.trunc((flat - first) / (last - first) * bins).astype(jnp.int32)
    inside = (flat >= first) & (flat <= last)
    place = jnp.where(inside, jnp.minimum(place, bins - 1), bins)
    return jnp.zeros(bins, first.dtype).at[place].add(1, mode="drop")


@lowers("aten.histogram.bin_ct")
def histogram(
    x: jax.Array, bins: int = 100, *, range: Sequence[float] | None = None, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Counts and the ``bins + 1`` edges, which span the data where no ``range`` is given (0 to 1 where there is none)."""
    dtype = accumulate_dtype(x.dtype)
    if range is None and x.size:
        first, last = _data_range(x)
    else:
        first, last = (jnp.asarray(limit, dtype) for limit in (range or (0.0, 1.0)))
    first, last = _widened(first, last, margin=0.5)
    edges = jnp.linspace(first, last, bins + 1, dtype=first.dtype)
    return histogram_edges(x, edges, weight=weight, density=density)


@lowers("aten.histogram.bins_tensor")
def histogram_edges(
    x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    counts = _count(x.reshape(-1), bins, weight)
    return (counts / (jnp.sum(counts) * jnp.diff(bins)) if density else counts), bins
