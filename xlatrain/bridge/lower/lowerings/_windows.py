"""The windows of a pooling along one dim: which input positions each output position covers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def per_dim(values: Sequence[int] | int, dims: int) -> tuple[int, ...]:
    """torch's number, list of one or list of ``dims`` numbers, as ``dims`` numbers."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * dims if len(values) == 1 else values


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows along one dim.

    Attributes:
        size: the dim's size in the input.
        positions: int array (output size, window length) of input positions; -1 or beyond ``size`` where there is none.
        step: (first position of the first window, stride, dilation) of evenly placed windows, None for others.
    """

    size: int
    positions: np.ndarray
    step: tuple[int, int, int] | None = None

    @property
    def length(self) -> int:
        return self.positions.shape[1]

    @property
    def inside(self) -> np.ndarray:
        """A mask of the positions that exist: bool (output size, window length)."""
        return (self.positions >= 0) & (self.positions < self.size)

    @property
    def padding(self) -> tuple[int, int]:
        """How far evenly placed windows reach beyond the beginning and the end."""
        return max(0, -int(self.positions.min())), max(0, int(self.positions.max()) + 1 - self.size)

    def seen(self, offset: int, low: int) -> slice:
        """Element number ``offset`` of each of evenly placed windows, in a dim that is padded by ``low`` at its beginning."""
        assert self.step is not None
        first = int(self.positions[0, offset]) + low
        return slice(first, int(self.positions[-1, offset]) + low + 1, self.step[1])

    def element(self, x: jax.Array, dim: int, offset: int, fill: float) -> jax.Array:
        """Element number ``offset`` of each window of ``x`` along ``dim``, whose size becomes the output size.

        ``fill`` stands where the element does not exist.
        """
        out = len(self.positions)
        if self.step is None:
            taken = jnp.take(x, jnp.asarray(np.clip(self.positions[:, offset], 0, self.size - 1)), axis=dim)
            return jnp.where(self.shaped(self.inside[:, offset], dim, x.ndim), taken, jnp.asarray(fill, x.dtype))
        start, stride, dilation = self.step
        first = start + offset * dilation
        last = first + stride * (out - 1)
        low, high = max(0, -first), max(0, last + 1 - self.size)
        if low or high:
            config = [(0, 0, 0)] * x.ndim
            config[dim] = (low, high, 0)
            x = lax.pad(x, jnp.asarray(fill, x.dtype), config)
        return lax.slice_in_dim(x, first + low, last + low + 1, stride, axis=dim)

    def spread(self, x: jax.Array, dim: int, offset: int) -> jax.Array:
        """The transpose of :meth:`element`: each output position's value at its window's element ``offset``, zero elsewhere.

        ``dim`` has the output size before and the input size after. Only for evenly placed windows.
        """
        assert self.step is not None
        start, stride, dilation = self.step
        first = start + offset * dilation
        last = first + stride * (len(self.positions) - 1)
        config = [(0, 0, 0)] * x.ndim
        config[dim] = (first, self.size - 1 - last, stride - 1)
        return lax.pad(x, jnp.zeros((), x.dtype), config)

    @staticmethod
    def shaped(values: np.ndarray, dim: int, ndim: int) -> jax.Array:
        """``values`` (output size,) to broadcast along ``dim`` of ``ndim``."""
        shape = [1] * ndim
        shape[dim] = -1
        return jnp.asarray(values).reshape(shape)


def fixed_windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Windows:
    """Windows of ``kernel`` elements; with ``ceil_mode`` the last one may overhang, if it starts before the right padding."""
    reach = dilation * (kernel - 1) + 1
    span = size + 2 * padding - reach + (stride - 1 if ceil_mode else 0)
    out = span // stride + 1
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1
    starts = np.arange(out) * stride - padding
    return Windows(size, starts[:, None] + dilation * np.arange(kernel), (-padding, stride, dilation))


def adaptive_windows(size: int, out: int) -> Windows:
    """Window i is ``[floor(i * size / out), ceil((i + 1) * size / out))``."""
    if out and size % out == 0:
        return fixed_windows(size, size // out, size // out, 0, 1, ceil_mode=False)
    starts = np.arange(out) * size // max(out, 1)
    ends = -(-(np.arange(1, out + 1) * size) // max(out, 1))
    offsets = np.arange(int((ends - starts).max(initial=0)))
    positions = starts[:, None] + offsets
    return Windows(size, np.where(positions < ends[:, None], positions, -1))
