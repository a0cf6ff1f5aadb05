"""Depthwise convolutions, one channel in and out of each group, as sums over taps of products by element, channels last.

XLA:CPU has no fast code for them: its loops take 10 to 60 times torch's time (``benchmarks/notes/speed_on_cpu.md``).

The sums are functions that XLA does not inline: it would sum anew in each op that reads the result, a LayerNorm's mean, variance
and rest, in code of some 300 instructions each time (``docs/design/0041-memory.md``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.functions import not_inlined
from xlatrain.bridge.lower.lowerings.windows import Sizes, Window
from xlatrain.bridge.lower.operands import accumulate_dtype


def convolution(x: jax.Array, weight: jax.Array, window: Window) -> jax.Array:
    """``x`` (N, C, …) by ``weight`` (C, 1, …), gives (N, C, …); summed in float32 where they have 16 bits."""
    image, out = x.shape[2:], window.positions(x.shape[2:])
    operands, taps = (_padded(x, window), _by_tap(weight, window, image, out)), tuple(window.taps(image, out))
    with not_inlined():
        by_place = _sum_of_taps(*operands, taps=taps, out=out, window=window, dtype=x.dtype)
    return jnp.moveaxis(by_place, -1, 1)


def transposed(y: jax.Array, weight: jax.Array, window: Window, image: Sizes) -> jax.Array:
    """The transpose of :func:`convolution`: ``y`` (N, C, …) by ``weight`` (C, 1, …) gives (N, C, *image).

    An ordinary convolution, without stride, of the positions at the places that they have in the image.
    """
    out = y.shape[2:]
    reach = [d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True)]
    # in the image with `reach - padding` zeros before and `padding` after it, cut where they are negative
    sizes = zip(reach, window.padding, image, out, window.stride, strict=True)
    config = [(r - p, n + p - ((m - 1) * s + 1), s - 1) for r, p, n, m, s in sizes]
    wide = _wide(y)
    placed = lax.pad(wide, jnp.zeros((), wide.dtype), [(0, 0, 0), *config, (0, 0, 0)])
    operands = placed, _by_tap(weight, window, image, out)
    taps = tuple((tap, tuple(map(operator.sub, reach, starts))) for tap, starts in window.taps(image, out))
    by_one = dataclasses.replace(window, stride=(1,) * len(image))
    with not_inlined():
        by_pixel = _sum_of_taps(*operands, taps=taps, out=tuple(image), window=by_one, dtype=y.dtype)
    return jnp.moveaxis(by_pixel, -1, 1)


def gradient_by_kernel(grad: jax.Array, x: jax.Array, window: Window) -> jax.Array:
    """(C, 1, …) from ``grad`` (N, C, …) and ``x`` (N, C, …)."""
    image, out = x.shape[2:], grad.shape[2:]
    with not_inlined():
        found = _sums_by_tap(_padded(x, window), _wide(grad), taps=tuple(window.taps(image, out)), window=window)
    reached = window.reached(image, out)
    by_kernel = found.astype(x.dtype).reshape(-1, 1, *map(len, reached))
    unseen = [(taps.start, size - taps.stop) for taps, size in zip(reached, window.kernel, strict=True)]
    return jnp.pad(by_kernel, [(0, 0), (0, 0), *unseen])


_Taps = tuple[tuple[Sizes, Sizes], ...]
"""Each tap: its index, and where in the padded image what it sees begins."""


# without compiler_options: a part of a program
@functools.partial(jax.jit, static_argnames=("taps", "out", "window", "dtype"))
def _sum_of_taps(x: jax.Array, by_tap: jax.Array, *, taps: _Taps, out: Sizes, window: Window, dtype: Any) -> jax.Array:
    """(N, *out, C) from images ``x`` (N, …, C) and ``by_tap`` (*taps, C)."""
    x, by_tap = lax.optimization_barrier((x, by_tap))
    given = (x[:, *window.seen(starts, out)] * by_tap[tap] for tap, starts in taps)
    return functools.reduce(operator.add, given).astype(dtype)


# without compiler_options: a part of a program
@functools.partial(jax.jit, static_argnames=("taps", "window"))
def _sums_by_tap(x: jax.Array, grads: jax.Array, *, taps: _Taps, window: Window) -> jax.Array:
    """(C, taps) from images ``x`` (N, …, C) and ``grads`` (N, …, C): the taps of a row are summed in one pass over the images."""
    x, grads = lax.optimization_barrier((x, grads))
    zero = jnp.zeros((), grads.dtype)
    found: list[jax.Array] = []
    for _, row in itertools.groupby(taps, lambda tap: tap[0][:-1]):
        products = tuple(x[:, *window.seen(starts, grads.shape[1:-1])] * grads for _, starts in row)
        found += lax.reduce(products, (zero,) * len(products), _sums, range(grads.ndim - 1))
    return jnp.stack(found, -1)


def _sums(some: tuple[jax.Array, ...], others: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(one + other for one, other in zip(some, others, strict=True))


def _wide(x: jax.Array) -> jax.Array:
    """``x`` (N, C, …) channels last, in the dtype in which it is summed."""
    return jnp.moveaxis(x, 1, -1).astype(accumulate_dtype(x.dtype))


def _padded(x: jax.Array, window: Window) -> jax.Array:
    return jnp.pad(_wide(x), [(0, 0), *((p, p) for p in window.padding), (0, 0)])


def _by_tap(weight: jax.Array, window: Window, image: Sizes, out: Sizes) -> jax.Array:
    """(*taps, C) of the taps of ``weight`` (C, 1, …) that are reached."""
    reached = window.reached(image, out)
    seeing = weight[(..., *(slice(taps.start, taps.stop) for taps in reached))]
    return _wide(seeing.swapaxes(0, 1))[0]
