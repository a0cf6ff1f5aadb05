"""Logical and bitwise operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import Operand, promote
from xlatrain.bridge.lower.registry import lowers


@lowers("aten.bitwise_and.Tensor", "aten.bitwise_and.Scalar", "aten.bitwise_and.Scalar_Tensor")
def bitwise_and(x: Operand, y: Operand) -> jax.Array:
    return jnp.bitwise_and(*promote(x, y))


@lowers("aten.bitwise_or.Tensor", "aten.bitwise_or.Scalar", "aten.bitwise_or.Scalar_Tensor")
def bitwise_or(x: Operand, y: Operand) -> jax.Array:
    return jnp.bitwise_or(*promote(x, y))


@lowers("aten.bitwise_xor.Tensor", "aten.bitwise_xor.Scalar", "aten.bitwise_xor.Scalar_Tensor")
def bitwise_xor(x: Operand, y: Operand) -> jax.Array:
    return jnp.bitwise_xor(*promote(x, y))


@lowers("aten.bitwise_not.default")
def bitwise_not(x: jax.Array) -> jax.Array:
    return jnp.bitwise_not(x)


@lowers("aten.bitwise_left_shift.Tensor", "aten.bitwise_left_shift.Tensor_Scalar", "aten.bitwise_left_shift.Scalar_Tensor",
        "aten.__lshift__.Tensor", "aten.__lshift__.Scalar")  # fmt: skip
def bitwise_left_shift(x: Operand, y: Operand) -> jax.Array:
    """Shifts by a negative amount, or by the width or more, give 0."""
    a, b = jnp.broadcast_arrays(*promote(x, y))
    return jnp.where(_in_width(a, b), lax.shift_left(a, b), 0)


@lowers("aten.bitwise_right_shift.Tensor", "aten.bitwise_right_shift.Tensor_Scalar", "aten.bitwise_right_shift.Scalar_Tensor",
        "aten.__rshift__.Tensor", "aten.__rshift__.Scalar")  # fmt: skip
def bitwise_right_shift(x: Operand, y: Operand) -> jax.Array:
    """Arithmetic for signed integers; shifts by a negative amount, or by the width or more, leave only the sign."""
    a, b = jnp.broadcast_arrays(*promote(x, y))
    if jnp.issubdtype(a.dtype, jnp.unsignedinteger):
        return jnp.where(_in_width(a, b), lax.shift_right_logical(a, b), 0)
    widest = jnp.asarray(8 * a.dtype.itemsize - 1, a.dtype)
    return lax.shift_right_arithmetic(a, jnp.where(_in_width(a, b), b, widest))


def _in_width(a: jax.Array, b: jax.Array) -> jax.Array:
    return (b >= 0) & (b < 8 * a.dtype.itemsize)


@lowers("aten.logical_and.default")
def logical_and(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.logical_and(x, y)


@lowers("aten.logical_or.default")
def logical_or(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.logical_or(x, y)


@lowers("aten.logical_xor.default")
def logical_xor(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.logical_xor(x, y)


@lowers("aten.logical_not.default")
def logical_not(x: jax.Array) -> jax.Array:
    return jnp.logical_not(x)
