"""The numbered random draws of ``xlatrain.bridge.random``: what the host has drawn, or from the step's key by ``jax.random``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xlatrain.bridge.host_draws import drawn_before
from xlatrain.bridge.lower.operands import accumulate_dtype
from xlatrain.bridge.lower.prng import draw_key, draw_normal
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.random import end_of_range
from xlatrain.bridge.tensors.dtypes import jax_dtype


def _fills(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Register the draws in the program of an op that fills a tensor; where the host has drawn its numbers, it gives those."""
    name = function.__name__

    op = getattr(torch.ops.xlatrain, name).default

    @lowers(f"xlatrain.{name}.default")
    def lowering(size: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *parameters: Any) -> jax.Array:
        found = drawn_before(op, (size, strides, dtype, *parameters))
        return function(tuple(size), dtype, *parameters) if found is None else found

    return function


def _affine(drawn: jax.Array, scale: float, shift: float) -> jax.Array:
    """``drawn * scale + shift`` without the steps that change nothing."""
    scaled = drawn if scale == 1 else drawn * scale
    return scaled if shift == 0 else scaled + shift


def _standard_uniform(size: tuple[int, ...], dtype: torch.dtype, index: Any) -> jax.Array:
    return jax.random.uniform(draw_key(index), size, jax_dtype(dtype))


def _standard_normal(size: tuple[int, ...], dtype: torch.dtype, index: Any) -> jax.Array:
    """16-bit values are rounded from float32, as torch's: drawn directly they have short tails."""
    return draw_normal(index, size, accumulate_dtype(jax_dtype(dtype))).astype(jax_dtype(dtype))


@_fills
def uniform(size: tuple[int, ...], dtype: torch.dtype, low: float, high: float, index: Any) -> jax.Array:
    """Uniform on [low, high)."""
    return _affine(_standard_uniform(size, dtype, index), high - low, low)


@_fills
def normal(size: tuple[int, ...], dtype: torch.dtype, mean: float, std: float, index: Any) -> jax.Array:
    """Draw from a normal distribution."""
    return _affine(_standard_normal(size, dtype, index), std, mean)


@_fills
def log_normal(size: tuple[int, ...], dtype: torch.dtype, mean: float, std: float, index: Any) -> jax.Array:
    """Draw numbers whose logarithm has a normal distribution."""
    return jnp.exp(normal(size, dtype, mean, std, index))


@_fills
def cauchy(size: tuple[int, ...], dtype: torch.dtype, median: float, sigma: float, index: Any) -> jax.Array:
    """Draw from a Cauchy distribution."""
    return median + sigma * jnp.tan(math.pi * (_standard_uniform(size, dtype, index) - 0.5))


@_fills
def bernoulli(size: tuple[int, ...], dtype: torch.dtype, p: float, index: Any) -> jax.Array:
    """Draw ones with probability ``p``, which is not rounded to bfloat16's 8 bits."""
    # u lies in [0, 1): never true for p = 0, always for p = 1
    return (_standard_uniform(size, torch.float32, index) < p).astype(jax_dtype(dtype))


@_fills
def exponential(size: tuple[int, ...], dtype: torch.dtype, lambd: float, index: Any) -> jax.Array:
    """Exponential variates; torch excludes 0 (it is divided by): the smallest is eps / 2 of the dtype drawn."""
    u = 1 - _standard_uniform(size, dtype, index)
    half_eps = torch.finfo(dtype).eps / 2
    return jnp.where(u >= 1 - half_eps, half_eps, -jnp.log(u)) / lambd


@_fills
def geometric(size: tuple[int, ...], dtype: torch.dtype, p: float, index: Any) -> jax.Array:
    """Numbers of trials up to the first success."""
    if p == 1:
        return jnp.ones(size, jax_dtype(dtype))
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    trials = jnp.ceil(jnp.log(1 - _standard_uniform(size, wide, index)) / math.log1p(-p))
    return jnp.maximum(trials, 1).astype(jax_dtype(dtype))


@_fills
def whole_range(size: tuple[int, ...], dtype: torch.dtype, index: Any) -> jax.Array:
    """Integers of all that ``random_()`` draws from."""
    return randint(size, dtype, 0, end_of_range(dtype), index)


@_fills
def randint(size: tuple[int, ...], dtype: torch.dtype, low: int, high: int, index: Any) -> jax.Array:
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
    key = draw_key(index)
    if high - 1 == limits.max:
        # jax.random.randint's upper end is exclusive and is itself a number of the dtype
        return _up_to_the_largest(key, size, low, drawn)
    return jax.random.randint(key, size, low, high, drawn)


def _up_to_the_largest(key: jax.Array, shape: tuple[int, ...], low: int, dtype: np.dtype) -> jax.Array:
    """Uniform integers in [low, largest of dtype]."""
    limits = np.iinfo(dtype)
    if low == limits.min:
        unsigned = jax.random.bits(key, shape, np.dtype(f"uint{limits.bits}"))
        return jax.lax.bitcast_convert_type(unsigned, dtype)
    return jax.random.randint(key, shape, low - 1, limits.max, dtype) + 1


@lowers("xlatrain.randperm.default")
def randperm(n: int, dtype: torch.dtype, index: Any) -> jax.Array:
    """A random permutation of 0 … n - 1."""
    found = drawn_before(torch.ops.xlatrain.randperm.default, (n, dtype, index))
    return jax.random.permutation(draw_key(index), n).astype(jax_dtype(dtype)) if found is None else found


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
