"""Sampling an image at the points of a grid (``F.grid_sample``), and its backward.

https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grid_sample.html
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.bridge.lower.registry import lowers

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _clip(position: jax.Array, size: int) -> jax.Array:
    """``position`` limited to the pixels; a position on the limit has no gradient, as in torch."""
    return jnp.clip(position, 0, size - 1)


@_clip.defjvp
def _clip_jvp(size: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (position,), (tangent,) = primals, tangents
    inside = (position > 0) & (position < size - 1)
    return _clip(position, size), jnp.where(inside, tangent, jnp.zeros_like(tangent))


def _reflect(position: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """``position`` reflected at the centers (``align_corners``) or at the outer edges of the border pixels."""
    low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
    if span == 0:
        return jnp.zeros_like(position)
    distance = jnp.abs(position - low)
    flips = jax.lax.stop_gradient(jnp.floor(distance / span))
    extra = distance - flips * span
    return jnp.where(flips % 2 == 0, extra, span - extra) + low


def _pixels(grid: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """Grid coordinates in [-1, 1] as pixel positions."""
    if align_corners:
        return (grid + 1) / 2 * (size - 1)
    return ((grid + 1) * size - 1) / 2


def _padded(position: jax.Array, size: int, padding_mode: int, align_corners: bool) -> jax.Array:
    """Positions in pixels, brought into the image as ``padding_mode`` says; positions that stay outside count as zero."""
    if padding_mode == _BORDER:
        return _clip(position, size)
    if padding_mode == _REFLECTION:
        return _clip(_reflect(position, size, align_corners), size)
    return position


def _gather(image: jax.Array, indices: Sequence[jax.Array]) -> jax.Array:
    """``image`` (C, …) at integer positions, one index array of the same shape per spatial dim; zero outside."""
    sizes = image.shape[1:]
    inside = jnp.ones(indices[0].shape, bool)
    flat = jnp.zeros(indices[0].shape, jnp.int32)
    for index, size in zip(indices, sizes, strict=True):
        inside &= (index >= 0) & (index < size)
        flat = flat * size + jnp.clip(index, 0, size - 1)
    values = jnp.take(image.reshape(image.shape[0], math.prod(sizes)), flat, axis=1, mode="clip")
    return jnp.where(inside, values, jnp.zeros((), image.dtype))


def _as_index(position: jax.Array) -> jax.Array:
    """An integral position as int32; far and non-finite ones become a position outside of every image."""
    held = (jnp.abs(position) < 2**30) & jnp.isfinite(position)
    return jnp.where(held, position, -1.0).astype(jnp.int32)


def _linear(image: jax.Array, positions: Sequence[jax.Array]) -> jax.Array:
    """Bilinear, or trilinear, samples of ``image`` (C, spatial…) at ``positions``, one array of pixels for each spatial dim."""
    lows = [jax.lax.stop_gradient(jnp.floor(position)) for position in positions]
    total = jnp.zeros((), image.dtype)
    for corner in itertools.product((0, 1), repeat=len(positions)):
        parts = zip(positions, lows, corner, strict=True)
        weights = [position - low if high else low + 1 - position for position, low, high in parts]
        values = _gather(image, [_as_index(low + high) for low, high in zip(lows, corner, strict=True)])
        total = total + values * functools.reduce(jnp.multiply, weights)
    return total


def _nearest(image: jax.Array, positions: Sequence[jax.Array]) -> jax.Array:
    """The nearest pixels of ``image`` (C, spatial…) at ``positions``, one array of pixels for each spatial dim."""
    # half-way positions go to the even pixel, as nearbyint does
    return _gather(image, [_as_index(jax.lax.stop_gradient(jnp.round(position))) for position in positions])


def _cubic_weights(t: jax.Array, a: float = -0.75) -> list[jax.Array]:
    """Keys' cubic convolution weights of the pixels at -1, 0, 1, 2 for a position ``t`` past pixel 0."""

    def near(x: jax.Array) -> jax.Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: jax.Array) -> jax.Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic(image: jax.Array, positions: Sequence[jax.Array], limit: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """Bicubic samples of ``image`` (C, H, W); ``limit`` brings a pixel (not the position) into the image."""
    (y, x), (height, width) = positions, image.shape[1:]
    low_y, low_x = jax.lax.stop_gradient(jnp.floor(y)), jax.lax.stop_gradient(jnp.floor(x))
    weights_y, weights_x = _cubic_weights(y - low_y), _cubic_weights(x - low_x)
    total = jnp.zeros((), image.dtype)
    for row, column in itertools.product(range(4), repeat=2):
        at_y, at_x = limit(low_y + (row - 1), height), limit(low_x + (column - 1), width)
        total = total + _gather(image, [_as_index(at_y), _as_index(at_x)]) * weights_y[row] * weights_x[column]
    return total


def _sample(image: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool) -> jax.Array:
    """``image`` (N, C, …), ``grid`` (N, …, dims) with the last spatial dim's coordinate first → (N, C, …)."""
    sizes = image.shape[2:]
    wide = jnp.promote_types(image.dtype, jnp.float32)

    def one(image: jax.Array, grid: jax.Array) -> jax.Array:
        raw = [_pixels(grid[..., len(sizes) - 1 - dim], size, align_corners) for dim, size in enumerate(sizes)]
        if interpolation_mode == _BICUBIC:
            return _cubic(image, raw, lambda at, size: jax.lax.stop_gradient(_padded(at, size, padding_mode, align_corners)))
        positions = [_padded(at, size, padding_mode, align_corners) for at, size in zip(raw, sizes, strict=True)]
        return _nearest(image, positions) if interpolation_mode == _NEAREST else _linear(image, positions)

    return jax.vmap(one)(image.astype(wide), grid.astype(wide)).astype(image.dtype)


@lowers("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(image: jax.Array, grid: jax.Array, interpolation_mode: int, padding_mode: int, align_corners: bool) -> jax.Array:
    """Bilinear (trilinear), nearest and, in two dims, bicubic."""
    return _sample(image, grid, interpolation_mode, padding_mode, align_corners)


@lowers("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sampler_backward(
    grad: jax.Array,
    image: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[jax.Array | None, jax.Array]:
    """Gradients by image (None when ``output_mask`` leaves it out) and grid."""
    _, pullback = jax.vjp(lambda image, grid: _sample(image, grid, interpolation_mode, padding_mode, align_corners), image, grid)
    grad_image, grad_grid = pullback(grad.astype(image.dtype))
    return (grad_image if output_mask[0] else None), grad_grid.astype(np.dtype(grid.dtype))
