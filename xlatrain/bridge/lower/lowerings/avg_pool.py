"""Average pooling over two and three dims, with fixed and with adaptive windows, and its backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrain.bridge.lower.lowerings._resample import resample
from xlatrain.bridge.lower.lowerings._windows import Windows, adaptive_windows, fixed_windows, per_dim
from xlatrain.bridge.lower.registry import lowers


def _wide(x: jax.Array) -> jax.Array:
    """``x`` in float32 where it is a 16-bit float: torch sums these in float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _counts(windows: Windows, padding: int, include_padding: bool) -> np.ndarray:
    """The number of elements that each window divides by: int (output size,).

    Elements inside count, and those in the padding where it counts; never the overhang of ``ceil_mode`` beyond the padding.
    """
    if include_padding:
        return (windows.positions < windows.size + padding).sum(axis=1)
    return windows.inside.sum(axis=1)


def _avg_pool(
    dims: int,
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    """Average pooling over the last ``dims`` dims, in the dtype of ``x``."""
    kernel = per_dim(kernel_size, dims)
    strides = per_dim(stride, dims) if len(stride) else kernel
    pads = per_dim(padding, dims)
    lead = x.ndim - dims
    windows = [
        fixed_windows(size, k, s, p, 1, ceil_mode) for size, k, s, p in zip(x.shape[lead:], kernel, strides, pads, strict=True)
    ]
    high = [int(along.positions[-1, -1]) + 1 - along.size for along in windows]
    wide = _wide(x)
    # a window that ends before the input does leaves a rest that no window covers
    covered = [size + min(0, h) for size, h in zip(x.shape[lead:], high, strict=True)]
    wide = lax.slice(wide, (0,) * x.ndim, (*x.shape[:lead], *covered))
    total = lax.reduce_window(
        wide,
        np.zeros((), wide.dtype),
        lax.add,
        (1,) * lead + kernel,
        (1,) * lead + strides,
        [(0, 0)] * lead + [(p, max(0, h)) for p, h in zip(pads, high, strict=True)],
    )
    if divisor_override is not None:
        return (total / divisor_override).astype(x.dtype)
    counts = [_counts(along, p, count_include_pad) for along, p in zip(windows, pads, strict=True)]
    divisor = functools.reduce(np.multiply.outer, counts).astype(np.float64)
    return (total / jnp.asarray(divisor, total.dtype)).astype(x.dtype)


def _adaptive_matrix(size: int, out: int) -> np.ndarray:
    """The matrix (out, size) whose row i averages the elements of adaptive window i."""
    windows = adaptive_windows(size, out)
    matrix = np.zeros((out, size))
    rows = np.broadcast_to(np.arange(out)[:, None], windows.positions.shape)[windows.inside]
    matrix[rows, windows.positions[windows.inside]] = 1
    return matrix / windows.inside.sum(axis=1, keepdims=True)


def _adaptive_avg_pool(dims: int, x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    """Adaptive average pooling of the last ``dims`` dims to ``output_size``, in the dtype of ``x``."""
    wide = _wide(x)
    for back, out in enumerate(reversed(per_dim(output_size, dims)), start=1):
        dim = x.ndim - back
        size = wide.shape[dim]
        if out and size % out == 0:
            wide = wide.reshape(*wide.shape[:dim], out, size // out, *wide.shape[dim + 1 :]).mean(axis=dim + 1)
        else:
            wide = resample(wide, dim, _adaptive_matrix(size, out))
    return wide.astype(x.dtype)


def _register(dims: int) -> None:
    @lowers(f"aten.avg_pool{dims}d.default")
    def avg_pool(x: jax.Array, *window: object) -> jax.Array:
        return _avg_pool(dims, x, *window)  # pyright: ignore[reportArgumentType]

    @lowers(f"aten.avg_pool{dims}d_backward.default")
    def avg_pool_backward(grad: jax.Array, x: jax.Array, *window: object) -> jax.Array:
        forward = functools.partial(lambda values: _avg_pool(dims, values, *window))  # pyright: ignore[reportArgumentType]
        return jax.linear_transpose(forward, x)(grad.astype(x.dtype))[0]

    @lowers(f"aten._adaptive_avg_pool{dims}d.default")
    def adaptive_avg_pool(x: jax.Array, output_size: Sequence[int]) -> jax.Array:
        return _adaptive_avg_pool(dims, x, output_size)

    @lowers(f"aten._adaptive_avg_pool{dims}d_backward.default")
    def adaptive_avg_pool_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
        output_size = grad.shape[grad.ndim - dims :]
        return jax.linear_transpose(lambda values: _adaptive_avg_pool(dims, values, output_size), x)(grad.astype(x.dtype))[0]


for _dims in (2, 3):
    _register(_dims)
