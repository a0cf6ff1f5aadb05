"""Tensors made from numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from xlatrain.bridge.lower.operands import Number, Operand, cast, default_float, number_dtype
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype

# Layout, device and pin_memory (``placement``) mean nothing for an XLA value; sparse layouts never get here.


def _dtype(dtype: torch.dtype | None, default: np.dtype | None = None) -> np.dtype:
    if dtype is not None:
        return jax_dtype(dtype)
    return default_float() if default is None else default


@lowers("aten.full.default")
def full(size: Sequence[int], fill_value: Operand, *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    default = fill_value.dtype if isinstance(fill_value, jax.Array) else number_dtype(fill_value)
    return jnp.broadcast_to(cast(fill_value, _dtype(dtype, default)), tuple(size))


@lowers("aten.full_like.default")
def full_like(x: jax.Array, fill_value: Operand, *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    return jnp.broadcast_to(cast(fill_value, _dtype(dtype, x.dtype)), x.shape)


@lowers("aten.empty.memory_format")
def zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    """Uninitialised memory reads as zeros."""
    return jnp.zeros(tuple(size), _dtype(dtype))


@lowers("aten._efficientzerotensor.default")
def efficient_zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    return zeros(size, dtype=dtype)


@lowers("aten.empty_strided.default", "aten.empty_permuted.default")
def empty_strided(size: Sequence[int], order: Sequence[int], *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    """Strides and physical order are invisible in an XLA value."""
    del order
    return zeros(size, dtype=dtype)


@lowers("aten.new_empty_strided.default")
def new_empty_strided(
    x: jax.Array, size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **placement: Any
) -> jax.Array:
    del stride
    return jnp.zeros(tuple(size), _dtype(dtype, x.dtype))


@lowers("aten.scalar_tensor.default")
def scalar_tensor(value: Operand, *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    return cast(value, _dtype(dtype))


@lowers("aten.arange.start_step")
def arange(start: Number, end: Number, step: Number = 1, *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    """``start + i * step``: integers exactly, floats from the index, so that errors do not add up."""
    if all(isinstance(value, int) for value in (start, end, step)):
        count = len(range(start, end, step))  # pyright: ignore[reportArgumentType]
        places = lax.iota(jax_dtype(torch.int64), count)
        exact = places * cast(step, places.dtype) + cast(start, places.dtype)
        return exact.astype(_dtype(dtype, places.dtype))
    count = int(np.ceil((end - start) / step))  # pyright: ignore[reportOperatorIssue]
    return jnp.asarray(np.asarray(start + np.arange(count, dtype=np.float64) * step, _dtype(dtype)))


@lowers("prims.iota.default")
def iota(length: int, *, start: int, step: int, dtype: torch.dtype, **placement: Any) -> jax.Array:
    return arange(start, start + length * step, step, dtype=dtype)


@lowers("aten.tril_indices.default")
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)), _dtype(dtype, jax_dtype(torch.int64)))


@lowers("aten.triu_indices.default")
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)), _dtype(dtype, jax_dtype(torch.int64)))
