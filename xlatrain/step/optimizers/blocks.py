"""Building blocks that several update rules share, written so that float32 keeps what torch keeps in double."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp


def number(value: Any) -> float:
    """An option value as a Python float; accepts what has ``item()`` (a 0-d tensor or array)."""
    return float(value.item()) if hasattr(value, "item") else float(value)


def log(decay: float) -> float:
    """The natural logarithm of a decay rate in [0, 1), with ``log(0) = -inf``."""
    return math.log(decay) if decay > 0 else -math.inf


def new_step() -> jax.Array:
    """The step counter before the first update, float32 as in torch."""
    return jnp.zeros((), jnp.float32)


def bias_correction(log_decay: jax.Array, step: jax.Array) -> jax.Array:
    """``1 - decay**step`` for ``step >= 1`` from ``log(decay)``: exact to float32 even where ``decay`` is nearly 1. Scalars."""
    return -jnp.expm1(step * log_decay)


def moving_average(average: jax.Array, value: jax.Array, decay: jax.Array, one_minus_decay: jax.Array) -> jax.Array:
    """``decay * average + (1 - decay) * value``, with ``1 - decay`` given since float32 cannot derive it."""
    return decay * average + one_minus_decay * value


def with_decay(param: jax.Array, grad: jax.Array, numbers: Any, decoupled: bool) -> tuple[jax.Array, jax.Array]:
    """Parameter and gradient after weight decay: decoupled decay shrinks the first (``decay_factor``), L2 adds to the second."""
    if decoupled:
        return param * numbers.decay_factor, grad
    return param, with_l2(grad, param, numbers.weight_decay)


def with_l2(grad: jax.Array, param: jax.Array, weight_decay: jax.Array) -> jax.Array:
    """The gradient with an L2 penalty. A decay of zero leaves it alone even where the parameter is infinite."""
    return jnp.where(weight_decay != 0, grad + weight_decay * param, grad)
