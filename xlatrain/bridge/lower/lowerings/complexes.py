"""Complex numbers: parts, conjugates and views as pairs of reals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import as_float, is_complex, promote
from xlatrain.bridge.lower.registry import lowers


@lowers("aten.complex.default")
def complex_(real: jax.Array, imag: jax.Array) -> jax.Array:
    return lax.complex(*jnp.broadcast_arrays(*promote(real, imag)))


@lowers("aten.polar.default")
def polar(size: jax.Array, angle: jax.Array) -> jax.Array:
    size, angle = jnp.broadcast_arrays(*promote(size, angle))
    return lax.complex(size * jnp.cos(angle), size * jnp.sin(angle))


@lowers("aten.view_as_real.default", "aten.view_as_real_copy.default")
def view_as_real(x: jax.Array) -> jax.Array:
    return jnp.stack([x.real, x.imag], axis=-1)


@lowers("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def view_as_complex(x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


@lowers("aten._conj.default", "aten._conj_physical.default", "aten._conj_copy.default")
def conj(x: jax.Array) -> jax.Array:
    return jnp.conj(x)


@lowers("aten._neg_view.default", "aten._neg_view_copy.default")
def neg_view(x: jax.Array) -> jax.Array:
    return -x


@lowers("aten.angle.default")
def angle(x: jax.Array) -> jax.Array:
    """The angle; of reals 0, pi for negative numbers, NaN for NaN."""
    if is_complex(x.dtype):
        return jnp.angle(x)
    x = as_float(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.asarray(jnp.pi, x.dtype), 0))
