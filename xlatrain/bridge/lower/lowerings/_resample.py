"""Linear maps along one dim given by a constant matrix with few entries per row: interpolation, adaptive averages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_MOST_TAPS = 16
"""Rows with more entries are multiplied as a dense matrix."""


def resample(x: jax.Array, dim: int, matrix: np.ndarray) -> jax.Array:
    """``out[…, i, …] = sum_j matrix[i, j] * x[…, j, …]`` along ``dim``.

    Few entries per row become that many gathers with constant indices, which neither need a scatter in their transpose (that is
    ``resample`` by ``matrix.T``) nor a contraction over the whole dim.
    """
    taps = _taps(matrix)
    if taps is None:
        weights = jnp.asarray(matrix, x.dtype)
        out = jnp.tensordot(x, weights, axes=[[dim], [1]], precision=jax.lax.Precision.HIGHEST)
        return jnp.moveaxis(out, -1, dim)
    along = [1] * x.ndim
    along[dim] = matrix.shape[0]
    out = None
    for index, weight in zip(*taps, strict=True):
        tap = _take(x, dim, index)
        if not np.all(weight == 1):
            tap = tap * jnp.asarray(weight.reshape(along), x.dtype)
        out = tap if out is None else out + tap
    assert out is not None
    return out


def _taps(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The column indices and weights, int and float (taps, rows), of a sparse matrix (rows, columns).

    None when a row has too many entries.
    """
    entries = matrix != 0
    count = max(1, int(entries.sum(axis=1).max(initial=0)))
    if count > _MOST_TAPS:
        return None
    # a stable sort moves each row's entries to the front, in the order of their columns
    columns = np.argsort(~entries, axis=1, kind="stable")[:, :count]
    return columns.T, np.take_along_axis(matrix, columns, axis=1).T


def _take(x: jax.Array, dim: int, index: np.ndarray) -> jax.Array:
    """``x`` at constant indices, int (n,), along ``dim``; slices and repetitions where the indices form such a pattern."""
    size = x.shape[dim]
    if np.array_equal(index, np.arange(size)):
        return x
    if len(index) > 1:
        step = int(index[1] - index[0])
        if step > 0 and np.array_equal(index, index[0] + step * np.arange(len(index))):
            return jax.lax.slice_in_dim(x, int(index[0]), int(index[-1]) + 1, step, axis=dim)
    times, rest = divmod(len(index), size)
    if rest == 0 and np.array_equal(index, np.repeat(np.arange(size), times)):
        return jnp.repeat(x, times, axis=dim)
    return jnp.take(x, jnp.asarray(index, np.int32), axis=dim, mode="clip")
