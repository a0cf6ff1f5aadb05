"""Activation functions."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import Number, accumulate_dtype
from xlatrain.bridge.lower.registry import lowers


def _wide(x: jax.Array) -> jax.Array:
    """``x`` in float32 where it is a 16-bit float: torch rounds these functions once, at the end."""
    return x.astype(accumulate_dtype(x.dtype))


@lowers("aten.gelu.default")
def gelu(x: jax.Array, *, approximate: str = "none") -> jax.Array:
    wide = _wide(x)
    return (jax.nn.gelu(wide, approximate=True) if approximate == "tanh" else exact_gelu(wide)).astype(x.dtype)


def exact_gelu(x: jax.Array) -> jax.Array:
    """GELU by erf, as torch has it: XLA:CPU computes JAX's, by erfc, with two branches and takes twice as long."""
    return x * (0.5 * (1 + lax.erf(x * math.sqrt(0.5))))


@lowers("aten.elu.default")
def elu(x: jax.Array, alpha: Number = 1.0, scale: Number = 1.0, input_scale: Number = 1.0) -> jax.Array:
    wide = _wide(x)
    negative = jnp.expm1(jnp.minimum(wide, 0) * input_scale) * (alpha * scale)
    return jnp.where(wide > 0, wide * scale, negative).astype(x.dtype)


@lowers("aten.leaky_relu.default")
def leaky_relu(x: jax.Array, negative_slope: Number = 0.01) -> jax.Array:
    return jnp.where(x > 0, x, _wide(x) * negative_slope).astype(x.dtype)


@lowers("aten.hardtanh.default")
def hardtanh(x: jax.Array, min_val: Number = -1, max_val: Number = 1) -> jax.Array:
    return jnp.clip(x, jnp.asarray(min_val, x.dtype), jnp.asarray(max_val, x.dtype))


@lowers("aten.hardshrink_backward.default", "aten.softshrink_backward.default")
def shrink_backward(grad: jax.Array, x: jax.Array, lambd: Number) -> jax.Array:
    return jnp.where((x >= -lambd) & (x <= lambd), 0, grad)
