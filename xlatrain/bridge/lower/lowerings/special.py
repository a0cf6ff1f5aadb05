"""Special functions (``torch.special``)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
from jax import lax

from xlatrain.bridge.lower.operands import Operand, accumulate_dtype, as_float, promote_float
from xlatrain.bridge.lower.registry import lowers

Unary = Callable[[jax.Array], jax.Array]


def _wide(x: jax.Array) -> jax.Array:
    """Integers in torch's default floating dtype, 16-bit floats in float32; the result is cast back to what torch promised."""
    x = as_float(x)
    return x.astype(accumulate_dtype(x.dtype))


def _on_wide(fn: Unary) -> Unary:
    return lambda x: fn(_wide(x))


def digamma_(x: jax.Array) -> jax.Array:
    """The digamma function: ∓inf at ±0, NaN at negative integers."""
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x))


def spherical_bessel_j0_(x: jax.Array) -> jax.Array:
    """The spherical Bessel function of order 0, by its series near 0."""
    near_zero = jnp.abs(x) < 0.5
    square = x * x
    series = 1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square / 362880)))
    far = jnp.where(near_zero, 1, x)
    return jnp.where(near_zero, series, jnp.where(jnp.isinf(x), 0, jnp.sin(far) / far))


_UNARY: dict[str, Unary] = {
    "digamma": digamma_,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "i0": jsp.i0,
    "lgamma": lax.lgamma,
    "special_i0e": jsp.i0e,
    "special_i1": jsp.i1,
    "special_i1e": jsp.i1e,
    "special_modified_bessel_i0": jsp.i0,
    "special_modified_bessel_i1": jsp.i1,
    "special_ndtri": jsp.ndtri,
    "special_spherical_bessel_j0": spherical_bessel_j0_,
}
if hasattr(jsp, "erfcx"):  # since JAX 0.10.1
    _UNARY["special_erfcx"] = jsp.erfcx

for _name, _fn in _UNARY.items():
    lowers(f"aten.{_name}.default")(_on_wide(_fn))


@lowers("aten.polygamma.default")
def polygamma(n: int, x: jax.Array) -> jax.Array:
    """The n-th derivative of digamma."""
    x = _wide(x)
    if n == 0:
        return digamma_(x)
    if n == 1:
        return _trigamma(x)
    factorial = jnp.exp(lax.lgamma(jnp.asarray(n + 1.0, x.dtype)))
    return (1 if n % 2 else -1) * factorial * _hurwitz(jnp.full(x.shape, n + 1.0, x.dtype), x)


def _trigamma(x: jax.Array) -> jax.Array:
    """The trigamma function; by reflection below 0.5."""
    left = x < 0.5
    positive = jnp.where(left, 1 - x, x)
    value = lax.zeta(jnp.asarray(2.0, x.dtype), positive)
    return jnp.where(left, (jnp.pi / jnp.sin(jnp.pi * x)) ** 2 - value, value)


def _broadcast(x: Operand, y: Operand) -> list[jax.Array]:
    return jnp.broadcast_arrays(*(_wide(operand) for operand in promote_float(x, y)))


@lowers("aten.igamma.default")
def igamma(a: jax.Array, x: jax.Array) -> jax.Array:
    return lax.igamma(*_broadcast(a, x))


@lowers("aten.igammac.default")
def igammac(a: jax.Array, x: jax.Array) -> jax.Array:
    return lax.igammac(*_broadcast(a, x))


@lowers("aten.special_zeta.default", "aten.special_zeta.other_scalar", "aten.special_zeta.self_scalar")
def zeta(x: Operand, q: Operand) -> jax.Array:
    return _hurwitz(*_broadcast(x, q))


def _hurwitz(x: jax.Array, q: jax.Array) -> jax.Array:
    """Hurwitz zeta, also for negative ``q`` where ``x`` is an integer: terms are added until ``q`` is positive."""

    def add_term(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, at = state
        left = movable & (at < 0)
        return jnp.where(left, total + at**-x, total), jnp.where(left, at + 1, at)

    movable = (q < 0) & (q != jnp.floor(q)) & (x == jnp.floor(x)) & (x > 1) & jnp.isfinite(q)
    total, at = lax.while_loop(lambda state: jnp.any(movable & (state[1] < 0)), add_term, (jnp.zeros_like(q), q))
    return total + lax.zeta(x, at)
