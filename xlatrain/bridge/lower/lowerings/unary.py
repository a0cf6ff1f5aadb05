"""Element-wise functions of one tensor that have a JAX function of the same meaning."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import accumulate_dtype, as_float, is_complex, is_float
from xlatrain.bridge.lower.registry import lowers

Unary = Callable[[jax.Array], jax.Array]

# Integers and bools are computed in torch's default floating dtype.
_FLOATING: dict[str, Unary] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}

# Integers stay integers.
_SAME_DTYPE: dict[str, Unary] = {"abs": jnp.abs, "neg": jnp.negative, "isnan": jnp.isnan, "isinf": jnp.isinf}

# Integers and bools are already round.
_ROUNDING: dict[str, Unary] = {"ceil": jnp.ceil, "floor": jnp.floor, "round": jnp.round, "trunc": jnp.trunc}


def _on_floats(fn: Unary) -> Unary:
    return lambda x: fn(as_float(x))


def _unless_integer(fn: Unary) -> Unary:
    return lambda x: fn(x) if is_float(x.dtype) or is_complex(x.dtype) else x


for _name, _fn in _FLOATING.items():
    lowers(f"aten.{_name}.default")(_on_floats(_fn))
for _name, _fn in _SAME_DTYPE.items():
    lowers(f"aten.{_name}.default")(_fn)
for _name, _fn in _ROUNDING.items():
    lowers(f"aten.{_name}.default")(_unless_integer(_fn))


@lowers("aten.round.decimals")
def round_decimals(x: jax.Array, *, decimals: int) -> jax.Array:
    if not is_float(x.dtype):
        return x
    wide = x.astype(accumulate_dtype(x.dtype))
    scale = 10.0 ** abs(decimals)
    return jnp.round(wide * scale) / scale if decimals > 0 else jnp.round(wide / scale) * scale


@lowers("aten.reciprocal.default")
def reciprocal(x: jax.Array) -> jax.Array:
    return 1 / as_float(x)


@lowers("aten.sign.default")
def sign(x: jax.Array) -> jax.Array:
    """The sign, -1, 0 or 1; 0 for NaN, as torch counts comparisons."""
    if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return (x != 0).astype(x.dtype)
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


@lowers("aten.signbit.default")
def signbit(x: jax.Array) -> jax.Array:
    return jnp.signbit(x) if is_float(x.dtype) else x < 0


@lowers("aten.frexp.Tensor")
def frexp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mantissa, exponent = jnp.frexp(x.astype(accumulate_dtype(x.dtype)))
    return mantissa, jnp.where(jnp.isfinite(x), exponent, 0)


@lowers("aten.relu.default")
def relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, jnp.zeros((), x.dtype))
