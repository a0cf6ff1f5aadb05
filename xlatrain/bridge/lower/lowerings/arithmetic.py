"""Arithmetic of two operands, with torch's promotion, division modes and integer powers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import (
    Number,
    Operand,
    accumulate_dtype,
    cast,
    is_complex,
    is_float,
    promote,
    promote_float,
    promoting,
    result_dtype,
)
from xlatrain.bridge.lower.registry import lowers


@lowers("aten.add.Tensor", "aten.add.Scalar")
def add(x: Operand, y: Operand, alpha: Number = 1) -> jax.Array:
    a, b = promote(x, y)
    return a + _scaled(b, alpha)


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def sub(x: Operand, y: Operand, alpha: Number = 1) -> jax.Array:
    a, b = promote(x, y)
    return a - _scaled(b, alpha)


def _scaled(x: jax.Array, alpha: Number) -> jax.Array:
    return x if alpha == 1 else x * cast(alpha, x.dtype)


@lowers("aten.mul.Tensor", "aten.mul.Scalar")
def mul(x: Operand, y: Operand) -> jax.Array:
    a, b = promote(x, y)
    return a * b


@lowers("aten.div.Tensor", "aten.div.Scalar")
def div(x: Operand, y: Operand) -> jax.Array:
    a, b = promote_float(x, y)
    return a / b


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def div_mode(x: Operand, y: Operand, *, rounding_mode: str | None) -> jax.Array:
    if rounding_mode is None:
        return div(x, y)
    return _trunc_div(x, y) if rounding_mode == "trunc" else floor_divide(x, y)


def _trunc_div(x: Operand, y: Operand) -> jax.Array:
    """The quotient rounded towards zero, in the promoted dtype and the broadcast shape of both operands."""
    a, b = promote(x, y)
    a, b = jnp.broadcast_arrays(a, b)
    return jnp.trunc(a / b) if is_float(a.dtype) else lax.div(a, b)


def floor_divide(x: Operand, y: Operand) -> jax.Array:
    """Floats: the quotient of the exact remainder, so that it agrees with ``remainder`` (Python's ``//``); x / 0 is ±inf, NaN."""
    a, b = promote(x, y)
    if not is_float(a.dtype):
        return jnp.floor_divide(a, b)
    a, b = jnp.broadcast_arrays(a, b)
    wide = accumulate_dtype(a.dtype)
    a, b = a.astype(wide), b.astype(wide)
    rest = lax.rem(a, b)
    quotient = (a - rest) / b
    quotient = jnp.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1, quotient)
    rounded = jnp.floor(quotient)
    rounded = jnp.where(quotient - rounded > 0.5, rounded + 1, rounded)
    rounded = jnp.where(quotient == 0, jnp.copysign(0, a / b), rounded)
    return jnp.where(b == 0, a / b, rounded)


@lowers("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(x: Operand, y: Operand) -> jax.Array:
    a, b = jnp.broadcast_arrays(*promote(x, y))
    rest = lax.rem(a, b)
    return jnp.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


@lowers("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(x: Operand, y: Operand) -> jax.Array:
    return lax.rem(*jnp.broadcast_arrays(*promote(x, y)))


@lowers("aten.pow.Tensor_Scalar")
def pow_tensor_scalar(x: jax.Array, exponent: Number) -> jax.Array:
    """Small exponents as products and roots, which XLA fuses and which torch computes alike."""
    if isinstance(exponent, complex) or (isinstance(exponent, float) and not exponent.is_integer()):
        (base,) = promote_float(x)
        if exponent == 0.5 and not is_complex(base.dtype):
            return jnp.sqrt(base)
        if exponent == -0.5 and not is_complex(base.dtype):
            return lax.rsqrt(base)
        return power(x, exponent)
    base = x.astype(result_dtype(x, exponent))
    if isinstance(exponent, bool) or abs(exponent) > 8 or (exponent < 0 and not is_float(base.dtype)):
        return power(x, exponent)
    return lax.integer_pow(base, int(exponent))


@lowers("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def power(x: Operand, y: Operand) -> jax.Array:
    a, b = promote(x, y)
    if is_float(a.dtype) or is_complex(a.dtype):
        return jnp.power(a, b)
    if a.dtype == jnp.bool_:
        return a | ~b
    return _integer_power(a, b)


def _integer_power(a: jax.Array, b: jax.Array) -> jax.Array:
    """Integer powers; a negative exponent gives the exact quotient, truncated: 1 or -1 for bases 1 and -1, else 0."""
    a, b = jnp.broadcast_arrays(a, b)
    positive = jnp.power(a, jnp.maximum(b, 0))
    if jnp.issubdtype(b.dtype, jnp.unsignedinteger):
        return positive
    of_minus_one = jnp.where(b % 2 == 0, 1, -1).astype(a.dtype)
    negative = jnp.where(a == 1, 1, jnp.where(a == -1, of_minus_one, 0)).astype(a.dtype)
    return jnp.where(b < 0, negative, positive)


# Functions of two tensors in their common dtype.
_OF_TWO: dict[str, Callable[..., jax.Array]] = {
    "hypot": jnp.hypot,
    "gcd": jnp.gcd,
    "lcm": jnp.lcm,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
}


for _name, _fn in _OF_TWO.items():
    lowers(f"aten.{_name}.default")(promoting(_fn))


@lowers("aten.atan2.default")
def atan2(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.arctan2(*promote_float(x, y))


@lowers("aten.copysign.Tensor", "aten.copysign.Scalar")
def copysign(x: Operand, y: Operand) -> jax.Array:
    return jnp.copysign(*promote_float(x, y))


@lowers("aten.ldexp.Tensor")
def ldexp(x: jax.Array, exponent: jax.Array) -> jax.Array:
    return mul(x, power(2.0, exponent))


@lowers("aten.nextafter.default")
def nextafter(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.nextafter(*jnp.broadcast_arrays(*promote(x, y)))
