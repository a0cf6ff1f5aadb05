"""Max pooling over two and three dims, with fixed and with adaptive windows, torch's indices and its gradients.

The indices decide where a gradient goes: ties go to the first element of the window in row-major order, and a NaN is the
maximum. Windows are reduced one dim at a time, which costs the sum of the kernel's sizes rather than their product.

On CPUs images have their channels last, as convolutions give them there, and evenly placed windows are reduced in one pass, tap
by tap: 0.2 to 0.6 of the time. Gradients are scattered, in 0.8 to 1.3 of torch's time; a sum of shifted gradients takes 1 to 6
times that, and is computed anew by what reads it (``benchmarks/notes/speed_on_cpu.md``).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrain.bridge.lower.functions import not_inlined
from xlatrain.bridge.lower.lowerings._windows import Windows, adaptive_windows, fixed_windows, per_dim
from xlatrain.bridge.lower.registry import lowers

_MOST_ELEMENTS = 64
"""Kernels with more elements are not taken element by element: their backward scatters on every platform."""


def _lowest(dtype: np.dtype) -> float:
    return -math.inf if jnp.issubdtype(dtype, jnp.floating) else int(jnp.iinfo(dtype).min)


def _reduce(value: jax.Array, index: jax.Array, dim: int, windows: Windows) -> tuple[jax.Array, jax.Array]:
    """The maximum of ``value`` over ``windows`` along ``dim``, and the element of ``index`` (of the same shape) where it is."""
    lowest = _lowest(value.dtype)
    inside = windows.inside
    best = windows.element(value, dim, 0, lowest), windows.element(index, dim, 0, 0)
    for offset in range(1, windows.length):
        candidate = windows.element(value, dim, offset, lowest), windows.element(index, dim, offset, 0)
        wins = candidate[0] > best[0]
        if jnp.issubdtype(value.dtype, jnp.floating):
            wins |= jnp.isnan(candidate[0])
        # the first element that exists wins over padding, even when it is itself the lowest value
        begins = ~inside[:, offset - 1] & inside[:, offset]
        if begins.any():
            wins |= windows.shaped(begins, dim, value.ndim)
        best = jnp.where(wins, candidate[0], best[0]), jnp.where(wins, candidate[1], best[1])
    return best


def _max_pool_on_cpu(x: jax.Array, windows: Sequence[Windows]) -> tuple[jax.Array, jax.Array]:
    """Maxima and indices as those of :func:`_max_pool`."""
    if _by_scattering(windows):
        return _max_pool(x, windows)
    channels = x.ndim - len(windows) - 1
    with not_inlined():
        # without compiler_options: a part of the program that it is traced into
        value, index = jax.jit(functools.partial(_max_of_taps, windows=windows))(jnp.moveaxis(x, channels, -1))
    return jnp.moveaxis(value, -1, channels), jnp.moveaxis(index, -1, channels)


def _max_of_taps(x: jax.Array, windows: Sequence[Windows]) -> tuple[jax.Array, jax.Array]:
    """Maxima and indices as those of :func:`_max_pool`, of images (…, *size, C) with evenly placed windows."""
    first_dim = x.ndim - len(windows) - 1
    pads = [along.padding for along in windows]
    if any(map(any, pads)):
        lowest = jnp.asarray(_lowest(x.dtype), x.dtype)
        config = [(0, 0, 0)] * first_dim + [(low, high, 0) for low, high in pads] + [(0, 0, 0)]
        with not_inlined():  # the image is padded once, not for each tap
            # without compiler_options: a part of the program that it is traced into
            x = jax.jit(functools.partial(lax.pad, padding_config=config))(x, lowest)
    strides = [math.prod(along.size for along in windows[dim + 1 :]) for dim in range(len(windows))]
    begins = [np.where(along.inside, along.positions, along.size).min(1) for along in windows]  # where nothing is larger
    best: jax.Array | None = None
    for offsets in itertools.product(*(range(along.length) for along in windows)):
        each = zip(windows, offsets, pads, strict=True)
        seen = x[(..., *(along.seen(offset, low) for along, offset, (low, _) in each), slice(None))]
        if best is None:
            best, index = seen, jnp.broadcast_to(_flat(begins, strides), seen.shape)
            continue
        wins = seen > best
        if jnp.issubdtype(x.dtype, jnp.floating):
            wins |= jnp.isnan(seen)
        at = _flat([along.positions[:, offset] for along, offset in zip(windows, offsets, strict=True)], strides)
        best, index = jnp.where(wins, seen, best), jnp.where(wins, at, index)
    assert best is not None
    return best, index


def _flat(positions: Sequence[np.ndarray], strides: Sequence[int]) -> jax.Array:
    """The flattened index of each combination of ``positions`` of the dims, int32 (*output size, 1)."""
    flat = functools.reduce(operator.add, (at * stride for at, stride in zip(np.ix_(*positions), strides, strict=True)))
    return jnp.asarray(flat[..., None], jnp.int32)


def _max_pool(x: jax.Array, windows: Sequence[Windows]) -> tuple[jax.Array, jax.Array]:
    """Maxima over the last ``len(windows)`` dims, and their int32 indices into these dims, flattened."""
    spatial = x.shape[x.ndim - len(windows) :]
    value, index = x, jnp.broadcast_to(jnp.arange(math.prod(spatial), dtype=jnp.int32).reshape(spatial), x.shape)
    for back, along in enumerate(reversed(windows), start=1):
        value, index = _reduce(value, index, x.ndim - back, along)
    return value, index


def _backward(grad: jax.Array, x: jax.Array, indices: jax.Array, windows: Sequence[Windows]) -> jax.Array:
    """``grad`` at ``indices`` (of its shape) of zeros like ``x``, summed where one element was the maximum of several windows."""
    if _by_scattering(windows):
        return _scatter(grad, x, indices, len(windows))
    first_dim = x.ndim - len(windows)
    total = jnp.zeros(x.shape, grad.dtype)
    for offsets in itertools.product(*(range(along.length) for along in windows)):
        position = np.zeros((1,) * len(windows), np.int32)
        for dim, (along, offset) in enumerate(zip(windows, offsets, strict=True)):
            shape = [1] * len(windows)
            shape[dim] = -1
            position = position * along.size + along.positions[:, offset].reshape(shape)
        part = jnp.where(indices == position.astype(np.int32), grad, jnp.zeros((), grad.dtype))
        for dim, (along, offset) in enumerate(zip(windows, offsets, strict=True)):
            part = along.spread(part, first_dim + dim, offset)
        total = total + part
    return total


def _by_scattering(windows: Sequence[Windows]) -> bool:
    return any(along.step is None for along in windows) or math.prod(along.length for along in windows) > _MOST_ELEMENTS


def _backward_on_cpu(grad: jax.Array, x: jax.Array, indices: jax.Array, windows: Sequence[Windows]) -> jax.Array:
    """The gradient of :func:`_backward`, summed in torch's order."""
    channels = x.ndim - len(windows) - 1
    grads, images, at = (jnp.moveaxis(one, channels, -1) for one in (grad, x, indices))
    count = images.shape[-1]
    flat = at * count + jnp.arange(count, dtype=at.dtype)
    return jnp.moveaxis(_scatter(grads, images, flat, len(windows) + 1), -1, channels)


def _scatter(grad: jax.Array, x: jax.Array, indices: jax.Array, dims: int) -> jax.Array:
    """``grad`` at ``indices``, which count the last ``dims`` dims of ``x`` flattened, summed into zeros of the shape of ``x``."""
    rows, elements = math.prod(x.shape[: x.ndim - dims]), math.prod(x.shape[x.ndim - dims :])

    def row(values: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.zeros(elements, grad.dtype).at[at].add(values)

    return jax.vmap(row)(grad.reshape(rows, -1), indices.reshape(rows, -1)).reshape(x.shape)


def _fixed(
    x: jax.Array,
    dims: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | int,
    dilation: Sequence[int] | int,
    ceil_mode: bool,
) -> list[Windows]:
    """The windows along each of the last ``dims`` dims of ``x``."""
    kernel = per_dim(kernel_size, dims)
    strides = per_dim(stride, dims) if len(stride) else kernel
    each = zip(x.shape[x.ndim - dims :], kernel, strides, per_dim(padding, dims), per_dim(dilation, dims), strict=True)
    return [fixed_windows(*along, ceil_mode=ceil_mode) for along in each]


def _pooled(x: jax.Array, windows: Sequence[Windows]) -> tuple[jax.Array, jax.Array]:
    return lax.platform_dependent(x, cpu=lambda x: _max_pool_on_cpu(x, windows), default=lambda x: _max_pool(x, windows))


def _pooled_back(grad: jax.Array, x: jax.Array, indices: jax.Array, windows: Sequence[Windows]) -> jax.Array:
    return lax.platform_dependent(
        grad,
        x,
        indices,
        cpu=lambda grad, x, indices: _backward_on_cpu(grad, x, indices, windows),
        default=lambda grad, x, indices: _backward(grad, x, indices, windows),
    )


def _register(dims: int) -> None:
    @lowers(f"aten.max_pool{dims}d_with_indices.default")
    def max_pool(
        x: jax.Array,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] | int = 0,
        dilation: Sequence[int] | int = 1,
        ceil_mode: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        return _pooled(x, _fixed(x, dims, kernel_size, stride, padding, dilation, ceil_mode))

    @lowers(f"aten.max_pool{dims}d_with_indices_backward.default")
    def max_pool_backward(
        grad: jax.Array,
        x: jax.Array,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        indices: jax.Array,
    ) -> jax.Array:
        return _pooled_back(grad, x, indices, _fixed(x, dims, kernel_size, stride, padding, dilation, ceil_mode))

    @lowers(f"aten.adaptive_max_pool{dims}d.default")
    def adaptive_max_pool(x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
        sizes = zip(x.shape[x.ndim - dims :], per_dim(output_size, dims), strict=True)
        return _pooled(x, [adaptive_windows(size, out) for size, out in sizes])

    @lowers(f"aten.adaptive_max_pool{dims}d_backward.default")
    def adaptive_max_pool_backward(grad: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
        sizes = zip(x.shape[x.ndim - dims :], grad.shape[x.ndim - dims :], strict=True)
        return _pooled_back(grad, x, indices, [adaptive_windows(size, out) for size, out in sizes])


for _dims in (2, 3):
    _register(_dims)
