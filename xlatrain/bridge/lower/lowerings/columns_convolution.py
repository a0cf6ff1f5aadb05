"""Convolutions and their gradients as one matrix product of the kernel, as torch has it, and the columns of an image.

A column is what the kernel sees at one position of one sample. Where there are few positions, most of a convolution's work is
to read its kernel: these products take it in its own order, others make a copy of it first. Taps that see padding alone at all
positions are left out. When that is faster on XLA:CPU, ``convolution.py`` knows.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.lowerings.windows import Sizes, Window
from xlatrain.bridge.lower.operands import accumulate_dtype


def convolution(x: jax.Array, weight: jax.Array, window: Window) -> jax.Array:
    """``x`` (N, C, …) by ``weight`` (O, C, …), gives (N, O, …)."""
    out = window.positions(x.shape[2:])
    columns = _columns(x, window, out)
    kernel = _seeing(weight, window, x.shape[2:], out)
    product = lax.dot_general(kernel, columns, (((1,), (0,)), ((), ())), preferred_element_type=accumulate_dtype(x.dtype))
    return product.astype(x.dtype).reshape(-1, x.shape[0], *out).swapaxes(0, 1)


def transposed(y: jax.Array, weight: jax.Array, window: Window, image: Sizes) -> jax.Array:
    """The transpose of :func:`convolution`: ``y`` (N, O, …) by ``weight`` (O, C, …) gives (N, C, *image).

    What several positions give to a pixel is summed before it is rounded to 16 bits.
    """
    out = y.shape[2:]
    kernel = _seeing(weight, window, image, out)
    pixels = jnp.moveaxis(y, 1, -1).reshape(-1, y.shape[1])
    columns = lax.dot_general(pixels, kernel, (((1,), (0,)), ((), ())), preferred_element_type=accumulate_dtype(y.dtype))
    reached = window.reached(image, out)
    columns = columns.reshape(y.shape[0], *out, weight.shape[1], *map(len, reached))
    summed = _patches_back(columns, window, image) if window.is_patches() else _sum_of_taps(columns, window, image, out)
    return jnp.moveaxis(summed.astype(y.dtype), -1, 1)


def gradient_by_kernel(grad: jax.Array, x: jax.Array, window: Window) -> jax.Array:
    """(O, C, …) from ``grad`` (N, O, …) and ``x`` (N, C, …)."""
    image, out = x.shape[2:], grad.shape[2:]
    columns = _columns(x, window, out)
    grads = grad.swapaxes(0, 1).reshape(grad.shape[1], -1)
    by_kernel = lax.dot_general(grads, columns, (((1,), (1,)), ((), ())), preferred_element_type=accumulate_dtype(x.dtype))
    reached = window.reached(image, out)
    by_kernel = by_kernel.astype(x.dtype).reshape(grad.shape[1], x.shape[1], *map(len, reached))
    unseen = [(taps.start, size - taps.stop) for taps, size in zip(reached, window.kernel, strict=True)]
    return jnp.pad(by_kernel, [(0, 0), (0, 0), *unseen])


def _columns(x: jax.Array, window: Window, out: Sizes) -> jax.Array:
    """(C · taps, N · positions) of ``x`` (N, C, …): samples before positions, so that they may be split over devices."""
    if window.is_patches():
        return _patches(x, window, out)
    padded = jnp.pad(x.swapaxes(0, 1), [(0, 0), (0, 0), *((p, p) for p in window.padding)])
    seen = [padded[(..., *window.seen(starts, out))] for _, starts in window.taps(x.shape[2:], out)]
    return jnp.stack(seen, 1).reshape(x.shape[1] * len(seen), -1)


def _patches(x: jax.Array, window: Window, out: Sizes) -> jax.Array:
    """:func:`_columns` where positions lie side by side: the image's dims, each cut in two, in another order."""
    cut = x[(..., *(slice(n * k) for n, k in zip(out, window.kernel, strict=True)))]
    both = itertools.chain.from_iterable(zip(out, window.kernel, strict=True))
    positions = range(2, 2 + 2 * len(out), 2)
    split = cut.reshape(*x.shape[:2], *both).transpose(1, *(dim + 1 for dim in positions), 0, *positions)
    return split.reshape(x.shape[1] * math.prod(window.kernel), -1)


def _patches_back(columns: jax.Array, window: Window, image: Sizes) -> jax.Array:
    """The image (N, …, C) of columns (N, *positions, C, *kernel) that share no pixel; zero beyond them."""
    dims = len(image)
    order = itertools.chain.from_iterable((1 + dim, 2 + dims + dim) for dim in range(dims))
    covered = [n * k for n, k in zip(columns.shape[1 : 1 + dims], window.kernel, strict=True)]
    joined = columns.transpose(0, *order, 1 + dims).reshape(columns.shape[0], *covered, -1)
    return jnp.pad(joined, [(0, 0), *((0, n - m) for n, m in zip(image, covered, strict=True)), (0, 0)])


def _sum_of_taps(columns: jax.Array, window: Window, image: Sizes, out: Sizes) -> jax.Array:
    """The image (N, …, C) of columns (N, *positions, C, *taps): what each tap gives to the pixels that it sees, summed."""
    zero = jnp.zeros((), columns.dtype)
    given = (
        lax.pad(columns[(..., *tap)], zero, [(0, 0, 0), *window.back(starts, image, out), (0, 0, 0)])
        for tap, starts in window.taps(image, out)
    )
    return functools.reduce(operator.add, given)


def _seeing(weight: jax.Array, window: Window, image: Sequence[int], out: Sequence[int]) -> jax.Array:
    """The taps of ``weight`` that are reached, as a matrix (O, C · taps)."""
    reached = window.reached(image, out)
    return weight[(..., *(slice(taps.start, taps.stop) for taps in reached))].reshape(weight.shape[0], -1)
