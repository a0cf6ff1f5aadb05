"""Logical and bitwise operations."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import Operand, promote, promoting
from xlatrain.bridge.lower.registry import lowers

_BITWISE: dict[str, Callable[..., jax.Array]] = {"and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor}
_LOGICAL: dict[str, Callable[..., jax.Array]] = {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}


for _name, _fn in _BITWISE.items():
    lowers(*(f"aten.bitwise_{_name}.{kinds}" for kinds in ("Tensor", "Scalar", "Scalar_Tensor")))(promoting(_fn))
for _name, _fn in _LOGICAL.items():
    lowers(f"aten.logical_{_name}.default")(_fn)
lowers("aten.bitwise_not.default")(jnp.bitwise_not)
lowers("aten.logical_not.default")(jnp.logical_not)


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
