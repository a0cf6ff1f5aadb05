"""Orthogonal polynomials of an integer order given as a tensor, by their three-term recurrences."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import Operand, promote_float
from xlatrain.bridge.lower.registry import lowers

# (x, p1, next p from (k, x, p[k], p[k-1])); p0 is 1 for all of them.
First = Callable[[jax.Array], jax.Array]
Next = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def _chebyshev(k: jax.Array, x: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    del k
    return 2 * x * p - q


def _legendre(k: jax.Array, x: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    return ((2 * k + 1) * x * p - k * q) / (k + 1)


def _laguerre(k: jax.Array, x: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    return ((2 * k + 1 - x) * p - k * q) / (k + 1)


def _hermite_h(k: jax.Array, x: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    return 2 * (x * p - k * q)


def _hermite_he(k: jax.Array, x: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    return x * p - k * q


_FAMILIES: dict[str, tuple[First, Next]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev),
    "hermite_polynomial_h": (lambda x: 2 * x, _hermite_h),
    "hermite_polynomial_he": (lambda x: x, _hermite_he),
    "laguerre_polynomial_l": (lambda x: 1 - x, _laguerre),
    "legendre_polynomial_p": (lambda x: x, _legendre),
}


def _evaluate(x: jax.Array, n: jax.Array, first: First, following: Next) -> jax.Array:
    """The polynomial of order ``trunc(n)`` at ``x`` (of one shape and float dtype); 0 for a negative order."""
    order = jnp.trunc(n)
    highest = jnp.max(order, initial=0)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        k, p, q, value = state
        following_p = following(k, x, p, q)
        return k + 1, following_p, p, jnp.where(order == k + 1, following_p, value)

    p0, p1 = jnp.ones_like(x), first(x)
    start = jnp.where(order < 0, 0, jnp.where(order == 0, p0, jnp.where(order == 1, p1, jnp.nan)))
    state = (jnp.ones((), x.dtype), p1, p0, start)
    return lax.while_loop(lambda state: state[0] < highest, step, state)[3]


def _lowering(first: First, following: Next, shifted: bool) -> Callable[[Operand, Operand], jax.Array]:
    def polynomial(x: Operand, n: Operand) -> jax.Array:
        at, order = jnp.broadcast_arrays(*promote_float(x, n))
        return _evaluate(2 * at - 1 if shifted else at, order, first, following)

    return polynomial


def _names(family: str) -> tuple[str, ...]:
    return tuple(f"aten.special_{family}.{overload}" for overload in ("default", "x_scalar", "n_scalar"))


for _family, (_first, _next) in _FAMILIES.items():
    lowers(*_names(_family))(_lowering(_first, _next, shifted=False))
    if _family.startswith("chebyshev"):
        lowers(*_names(f"shifted_{_family}"))(_lowering(_first, _next, shifted=True))
