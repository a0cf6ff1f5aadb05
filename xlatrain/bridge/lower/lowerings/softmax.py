"""Softmax, log-softmax and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from xlatrain.bridge.lower.operands import accumulate_dtype, along
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype


@lowers("aten._safe_softmax.default")
def safe_softmax(x: jax.Array, dim: int, dtype: torch.dtype | None = None) -> jax.Array:
    """Zeros where all of a row is -inf. What torch decomposes it to looks for such rows among all elements; their largest tells.

    In float32 for 16-bit floats, rounded to ``dtype``, x's own if None.
    """
    wide, axis = along(x.astype(accumulate_dtype(x.dtype if dtype is None else jax_dtype(dtype))), dim)
    largest = jnp.max(wide, axis=axis, keepdims=True)
    exponentials = jnp.exp(wide - jnp.where(jnp.isneginf(largest), 0, largest))
    total = jnp.sum(exponentials, axis=axis, keepdims=True)
    softmax = exponentials / jnp.where(total == 0, 1, total)
    return softmax.reshape(x.shape).astype(x.dtype if dtype is None else jax_dtype(dtype))


@lowers("aten._softmax.default")
def softmax(x: jax.Array, dim: int, half_to_float: bool | torch.dtype | None = False) -> jax.Array:
    """Softmax, in float32 for 16-bit floats. ``half_to_float`` only fixes the result's dtype, which torch promised already."""
    del half_to_float
    wide, axis = along(x.astype(accumulate_dtype(x.dtype)), dim)
    return jax.nn.softmax(wide, axis=axis).reshape(x.shape)


@lowers("aten._log_softmax.default")
def log_softmax(x: jax.Array, dim: int, half_to_float: bool = False) -> jax.Array:
    """Log-softmax, in float32 for 16-bit floats. ``half_to_float`` only fixes the result's dtype, as torch promised already."""
    del half_to_float
    wide, axis = along(x.astype(accumulate_dtype(x.dtype)), dim)
    return jax.nn.log_softmax(wide, axis=axis).reshape(x.shape)
