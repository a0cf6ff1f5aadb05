"""The numbered random draws of ``xlatrain.bridge.random``, from the step's key by ``jax.random``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

import xlatrain.bridge.random  # noqa: F401  defines the ops
from xlatrain.bridge.lower.operands import accumulate_dtype
from xlatrain.bridge.lower.prng import draw_key, draw_normal
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype


@lowers("xlatrain.uniform.default")
def uniform(size: Sequence[int], dtype: torch.dtype, index: int) -> jax.Array:
    """Uniform on [0, 1)."""
    return jax.random.uniform(draw_key(index), tuple(size), jax_dtype(dtype))


@lowers("xlatrain.normal.default")
def normal(size: Sequence[int], dtype: torch.dtype, index: int) -> jax.Array:
    """Draw from the standard normal; 16-bit values are rounded from float32, as torch's: drawn directly they have short tails."""
    return draw_normal(index, tuple(size), accumulate_dtype(jax_dtype(dtype))).astype(jax_dtype(dtype))


@lowers("xlatrain.randint.default")
def randint(size: Sequence[int], low: int, high: int, dtype: torch.dtype, index: int) -> jax.Array:
    """Uniform integers in [low, high), in any dtype that holds them.

    Raises:
        ValueError: an empty range, or one beyond int32 while 64-bit types are off.
    """
    if low >= high:
        raise ValueError(f"random integers need low < high, found low={low}, high={high}")
    drawn = jax.dtypes.canonicalize_dtype(np.int64)
    limits = np.iinfo(drawn)
    if low < limits.min or high - 1 > limits.max:
        raise ValueError(
            f"random integers from [{low}, {high}) do not fit {drawn}: XLA computes torch's int64 as {drawn} here; "
            "draw from a smaller range, or enable 64-bit types (jax_enable_x64)"
        )
    key, shape = draw_key(index), tuple(size)
    if high - 1 == limits.max:
        # jax.random.randint's upper end is exclusive and is itself a number of the dtype
        return _up_to_the_largest(key, shape, low, drawn)
    return jax.random.randint(key, shape, low, high, drawn)


def _up_to_the_largest(key: jax.Array, shape: tuple[int, ...], low: int, dtype: np.dtype) -> jax.Array:
    """Uniform integers in [low, largest of dtype]."""
    limits = np.iinfo(dtype)
    if low == limits.min:
        unsigned = jax.random.bits(key, shape, np.dtype(f"uint{limits.bits}"))
        return jax.lax.bitcast_convert_type(unsigned, dtype)
    return jax.random.randint(key, shape, low - 1, limits.max, dtype) + 1


@lowers("xlatrain.randperm.default")
def randperm(n: int, dtype: torch.dtype, index: int) -> jax.Array:
    """A random permutation of 0 … n - 1."""
    return jax.random.permutation(draw_key(index), n).astype(jax_dtype(dtype))


@lowers("xlatrain.poisson.default")
def poisson(rate: jax.Array, index: int) -> jax.Array:
    """Poisson counts with mean ``rate``, in the dtype of ``rate``."""
    return jax.random.poisson(_threefry(draw_key(index)), rate.astype(jnp.float32), rate.shape).astype(rate.dtype)


def _threefry(key: jax.Array) -> jax.Array:
    """A key of JAX's threefry generator: ``jax.random.poisson`` takes no other, and those of initial values are another's."""
    if jax.random.key_impl(key) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")


@lowers("xlatrain.binomial.default")
def binomial(count: jax.Array, prob: jax.Array, index: int) -> jax.Array:
    """Number of successes in ``count`` trials of probability ``prob``."""
    wide = jnp.promote_types(jnp.promote_types(count.dtype, prob.dtype), jnp.float32)
    return jax.random.binomial(draw_key(index), count.astype(wide), prob.astype(wide), count.shape, wide)


@lowers("xlatrain.gamma.default")
def gamma(concentration: jax.Array, index: int) -> jax.Array:
    """Gamma variates of scale 1; torch keeps them above the smallest normal number."""
    wide = jnp.promote_types(concentration.dtype, jnp.float32)
    drawn = jax.random.gamma(draw_key(index), concentration.astype(wide), concentration.shape, wide).astype(concentration.dtype)
    return jnp.maximum(drawn, jnp.finfo(concentration.dtype).tiny)


@lowers("aten._standard_gamma_grad.default")
def standard_gamma_grad(concentration: jax.Array, output: jax.Array) -> jax.Array:
    """The derivative of a gamma variate by its concentration (implicit reparametrisation)."""
    wide = jnp.promote_types(concentration.dtype, jnp.float32)
    return jax.lax.random_gamma_grad(concentration.astype(wide), output.astype(wide))  # pyright: ignore[reportCallIssue]
