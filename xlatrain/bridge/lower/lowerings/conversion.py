"""Dtype conversions, copies and aliases."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.typing import DTypeLike

from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.lower.operands import is_complex, is_float, is_integer
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype


def convert(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``x`` as ``dtype``, as torch's ``to``: floats truncate towards zero and small integers wrap around.

    XLA saturates where a float does not fit an integer type; torch (on x86) keeps the low bits, which going through int32 does.
    """
    if is_float(x.dtype) and is_integer(dtype) and np.dtype(dtype).itemsize < 4:
        return x.astype(np.int32).astype(dtype)
    if is_complex(x.dtype) and not is_complex(dtype) and np.dtype(dtype) != np.bool_:
        return convert(x.real, dtype)
    return x.astype(dtype)


@lowers("aten._to_copy.default")
def to_copy(x: jax.Array, dtype: torch.dtype | None = None, **placement: Any) -> jax.Array:
    """Device, layout and memory format mean nothing for an XLA value; only dense tensors get here."""
    del placement
    return x if dtype is None else convert(x, jax_dtype(dtype))


@lowers("prims.convert_element_type.default")
def convert_element_type(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return convert(x, jax_dtype(dtype))


@lowers(
    "aten.alias.default",
    "aten.clone.default",
    "aten.detach_copy.default",
    "aten.lift.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
)
def same(x: jax.Array, *, memory_format: torch.memory_format | None = None) -> jax.Array:
    """XLA values are immutable and have no user-visible layout: a copy is the value itself."""
    del memory_format
    return x


@lowers("aten.copy.default")
def copy(x: jax.Array, source: jax.Array, non_blocking: bool = False) -> jax.Array:
    del non_blocking
    return jnp.broadcast_to(convert(source, x.dtype), x.shape)


@lowers("aten.view.dtype", "aten.view_copy.dtype")
def view_dtype(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    """The bits read as another dtype; the last dim grows or shrinks with the width.

    Raises:
        LoweringError: 64-bit dtypes without x64, which XLA holds in 32 bits.
    """
    target = jax_dtype(dtype)
    if target.itemsize != dtype.itemsize:
        raise LoweringError(f"view({dtype}) reads 64-bit values, which XLA computes in 32 bits; enable x64 or view as 32 bits")
    if x.dtype == target:
        return x
    if x.dtype == jnp.bool_:
        x = x.astype(np.uint8)
    if x.dtype.itemsize == target.itemsize:
        return _bitcast(x, target)
    if x.dtype.itemsize > target.itemsize:
        return _bitcast(x, target).reshape(*x.shape[:-1], -1)
    ratio = target.itemsize // x.dtype.itemsize
    return _bitcast(x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio), target)


def _bitcast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The bits of ``x`` as ``dtype``.

    Raises:
        LoweringError: a complex dtype on either side.
    """
    if is_complex(x.dtype) or is_complex(dtype):
        raise LoweringError(f"view from {x.dtype} to {dtype} is not supported; use torch.view_as_real or view_as_complex")
    return lax.bitcast_convert_type(x, np.uint8) != 0 if dtype == np.bool_ else lax.bitcast_convert_type(x, dtype)
