"""Discrete Fourier transforms over dims.

``normalization`` is torch's: 0 none, 1 divides by the square root of the number of elements, 2 by the number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import canonical_dim
from xlatrain.bridge.lower.registry import lowers


def _normalised(x: jax.Array, count: int, normalization: int) -> jax.Array:
    """Scale by torch's ``normalization``: 0 by nothing, 1 by ``1 / sqrt(count)``, 2 by ``1 / count``."""
    if normalization == 0 or count == 0:
        return x
    return x * (1 / math.sqrt(count) if normalization == 1 else 1 / count)


def _count(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[d] for d in dims)


def _c2c(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    """Complex FFT along one dim after the other, without normalization."""
    for dim in dims:
        x = jnp.fft.fft(x, axis=dim) if forward else jnp.fft.ifft(x, axis=dim, norm="forward")
    return x


@lowers("aten._fft_c2c.default")
def fft_c2c(x: jax.Array, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    return _normalised(_c2c(x, dim, forward), _count(x.shape, dim), normalization)


@lowers("aten._fft_r2c.default")
def fft_r2c(x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    """The last of ``dim`` is the halved one."""
    if onesided:
        half = jnp.fft.rfft(x, axis=dim[-1])
        return _normalised(_c2c(half, dim[:-1], True), _count(x.shape, dim), normalization)
    return fft_c2c(lax.complex(x, jnp.zeros_like(x)), dim, normalization, True)


@lowers("aten._fft_c2r.default")
def fft_c2r(x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    """Transform half a spectrum over the last of ``dim`` to a real tensor of ``last_dim_size`` there."""
    last = canonical_dim(dim[-1], x.ndim)
    whole = jnp.fft.irfft(_c2c(x, dim[:-1], False), n=last_dim_size, axis=last, norm="forward")
    return _normalised(whole, _count(whole.shape, dim), normalization)
