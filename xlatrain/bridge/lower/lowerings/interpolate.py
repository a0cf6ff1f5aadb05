"""``upsample_*``: interpolation along one to three dims as products with constant matrices, and their backward.

Coordinates are computed as torch's kernels do, in float32 (float64 for float64 input), so that ``nearest`` picks the same
neighbour. https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.interpolate.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.bridge.lower.lowerings._resample import resample
from xlatrain.bridge.lower.registry import lowers

Matrix = Callable[[int, int, float | None, np.dtype], np.ndarray]
"""(input size, output size, user's scale factor or None, dtype of the coordinates) → matrix (output, input)."""


def _scale(size: int, out: int, factor: float | None, dtype: np.dtype) -> np.generic:
    if factor is not None and factor > 0:
        return dtype.type(1.0 / factor)
    return dtype.type(size) / dtype.type(out)


def _source(size: int, out: int, factor: float | None, dtype: np.dtype, align_corners: bool) -> np.ndarray:
    """The position in the input, in pixels, of each output pixel: (out,)."""
    pixels = np.arange(out, dtype=dtype)
    if align_corners:
        step = dtype.type(size - 1) / dtype.type(out - 1) if out > 1 else dtype.type(0)
        return pixels * step
    return _scale(size, out, factor, dtype) * (pixels + dtype.type(0.5)) - dtype.type(0.5)


def _matrix_of(index: np.ndarray, weight: np.ndarray, size: int) -> np.ndarray:
    """The matrix whose row i has ``weight[i, k]`` at column ``index[i, k]``, clipped to the input; equal columns add up."""
    matrix = np.zeros((len(index), size), weight.dtype)
    np.add.at(matrix, (np.arange(len(index))[:, None], np.clip(index, 0, size - 1)), weight)
    return matrix


def _nearest(size: int, out: int, factor: float | None, dtype: np.dtype) -> np.ndarray:
    """The matrix (out, size) that picks the pixel at ``floor(i * scale)``."""
    index = np.floor(np.arange(out, dtype=dtype) * _scale(size, out, factor, dtype)).astype(np.int64)
    return _matrix_of(index[:, None], np.ones((out, 1), dtype), size)


def _nearest_exact(size: int, out: int, factor: float | None, dtype: np.dtype) -> np.ndarray:
    """The matrix (out, size) that picks the pixel nearest to the centre of each output pixel."""
    pixels = np.arange(out, dtype=dtype) + dtype.type(0.5)
    index = np.floor(pixels * _scale(size, out, factor, dtype)).astype(np.int64)
    return _matrix_of(index[:, None], np.ones((out, 1), dtype), size)


def _linear(align_corners: bool) -> Matrix:
    def matrix(size: int, out: int, factor: float | None, dtype: np.dtype) -> np.ndarray:
        source = np.maximum(_source(size, out, factor, dtype, align_corners), dtype.type(0))
        low = np.minimum(source.astype(np.int64), size - 1)
        upper = np.clip(source - low.astype(dtype), dtype.type(0), dtype.type(1))
        return _matrix_of(np.stack([low, low + 1], 1), np.stack([1 - upper, upper], 1), size)

    return matrix


def _cubic_weight(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel at ``distance`` ≥ 0."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _cubic(align_corners: bool) -> Matrix:
    def matrix(size: int, out: int, factor: float | None, dtype: np.dtype) -> np.ndarray:
        source = _source(size, out, factor, dtype, align_corners)
        base = np.floor(source)
        index = base.astype(np.int64)[:, None] + np.arange(-1, 3)
        distance = np.abs((source - base)[:, None] - np.arange(-1, 3, dtype=dtype))
        return _matrix_of(index, _cubic_weight(distance, -0.75).astype(dtype), size)

    return matrix


def _triangle(distance: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1.0 - distance)


def _lanczos3(distance: np.ndarray) -> np.ndarray:
    return np.where(distance < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)


def _antialiased(kernel: Callable[[np.ndarray], np.ndarray], radius: float, align_corners: bool) -> Matrix:
    """A function that gives matrices (out, size) of an antialiased resampling.

    Rows are ``kernel``, widened by the scale where the image shrinks, over the input pixels in reach, normalised to sum 1.
    """

    def matrix(size: int, out: int, factor: float | None, dtype: np.dtype) -> np.ndarray:
        if align_corners:
            scale = float(size - 1) / (out - 1) if out > 1 else 0.0
        else:
            scale = float(_scale(size, out, factor, dtype))
        widening = max(scale, 1.0)
        reach = radius * widening
        rows = np.zeros((out, size))
        for i in range(out):
            center = scale * (i + 0.5)
            first = max(math.floor(center - reach + 0.5), 0)
            last = min(math.floor(center + reach + 0.5), size)
            weights = kernel(np.abs((np.arange(first, last) - center + 0.5) / widening))
            rows[i, first:last] = weights / weights.sum()
        return rows.astype(dtype)

    return matrix


def _interpolate(x: jax.Array, sizes: Sequence[int], factors: Sequence[float | None], matrix: Matrix) -> jax.Array:
    """``x`` (N, C, …) with its spatial dims resized to ``sizes``."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x
    # the last dim first, as torch nests its sums
    for position in reversed(range(len(sizes))):
        dim = 2 + position
        weights = matrix(x.shape[dim], sizes[position], factors[position], _coordinates(x))
        wide = resample(wide, dim, weights)
    return wide.astype(x.dtype)


def _interpolate_backward(
    grad: jax.Array, input_size: Sequence[int], factors: Sequence[float | None], matrix: Matrix
) -> jax.Array:
    """The gradient by the input (N, C, spatial…): each spatial dim of ``grad`` is multiplied by its matrix, transposed."""
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    for position, size in enumerate(input_size[2:]):
        dim = 2 + position
        weights = matrix(size, grad.shape[dim], factors[position], _coordinates(grad))
        wide = resample(wide, dim, weights.T)
    return wide.astype(grad.dtype)


def _coordinates(x: jax.Array) -> np.dtype:
    """The dtype in which torch computes positions: float64 for float64, else float32."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def _register_nearest(dims: int, prefix: str, matrix: Matrix) -> None:
    @lowers(f"aten.{prefix}{dims}d.default")
    def forward(x: jax.Array, output_size: Sequence[int], *factors: float | None) -> jax.Array:
        return _interpolate(x, output_size, factors or (None,) * dims, matrix)

    @lowers(f"aten.{prefix}{dims}d_backward.default")
    def backward(grad: jax.Array, output_size: Sequence[int], input_size: Sequence[int], *factors: float | None) -> jax.Array:
        return _interpolate_backward(grad, input_size, factors or (None,) * dims, matrix)


def _register_smooth(dims: int, name: str, matrix_of: Callable[[bool], Matrix]) -> None:
    @lowers(f"aten.{name}.default")
    def forward(x: jax.Array, output_size: Sequence[int], align_corners: bool, *factors: float | None) -> jax.Array:
        return _interpolate(x, output_size, factors or (None,) * dims, matrix_of(align_corners))

    @lowers(f"aten.{name}_backward.default")
    def backward(
        grad: jax.Array, output_size: Sequence[int], input_size: Sequence[int], align_corners: bool, *factors: float | None
    ) -> jax.Array:
        return _interpolate_backward(grad, input_size, factors or (None,) * dims, matrix_of(align_corners))


for _dims in (1, 2, 3):
    _register_nearest(_dims, "upsample_nearest", _nearest)
    _register_nearest(_dims, "_upsample_nearest_exact", _nearest_exact)
_register_smooth(1, "upsample_linear1d", _linear)
_register_smooth(2, "upsample_bilinear2d", _linear)
_register_smooth(3, "upsample_trilinear3d", _linear)
_register_smooth(2, "upsample_bicubic2d", _cubic)
_register_smooth(2, "_upsample_bilinear2d_aa", lambda align: _antialiased(_triangle, 1.0, align))
_register_smooth(2, "_upsample_bicubic2d_aa", lambda align: _antialiased(lambda d: _cubic_weight(d, -0.5), 2.0, align))
_register_smooth(2, "_upsample_lanczos2d_aa", lambda align: _antialiased(_lanczos3, 3.0, align))
