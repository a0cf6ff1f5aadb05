"""Convolutions and their gradients in the one form for which XLA:CPU has fast code: channels last, the kernel's before them.

XLA:CPU brings other forms into this one only in a program's entry computation. Inside a loop, as of rolled layers, what it finds
in another form runs in a naive loop nest, 16 times slower with the gradients (``benchmarks/notes/speed_on_cpu.md``).

It has none for volumes, which take 5 to 12 times as long as in torch. They become images, each slice of a volume one. Either what
the kernel sees along the depth becomes channels of the image, or each slice is convolved by all taps of the depth at once, whose
results are the channels, and these are summed, each tap's at the slices that it gives to. The second has the larger products, and
takes 0.3 to 0.9 of the first's time (``benchmarks/notes/speed_on_cpu.md``). The first does less where a stride leaves slices out,
or few channels become many.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.functions import not_inlined

Sizes = Sequence[int]


def convolution(
    x: jax.Array,
    kernel: jax.Array,
    *,
    stride: Sizes,
    padding: Sequence[tuple[int, int]],
    x_dilation: Sizes | None = None,
    kernel_dilation: Sizes | None = None,
    groups: int = 1,
) -> jax.Array:
    """``x`` (N, C, …) by ``kernel`` (O, C / groups, …), gives (N, O, …)."""
    if x.ndim == 5 and groups == 1:
        depth = _Depth(kernel.shape[2], stride[0], (kernel_dilation or (1,))[0], padding[0], (x_dilation or (1,))[0])
        volumes = jnp.moveaxis(x, 1, -1)
        sums_taps = depth.sums_taps(x.shape[1], kernel.shape[0])
        images = volumes if sums_taps else depth.as_channels(volumes)
        by_tap = kernel.transpose(2, 0, 1, 3, 4) if sums_taps else kernel.swapaxes(1, 2)
        out = convolution(
            jnp.moveaxis(images.reshape(-1, *images.shape[2:]), -1, 1),
            by_tap.reshape(-1, images.shape[-1], *kernel.shape[3:]),
            stride=stride[1:],
            padding=padding[1:],
            x_dilation=x_dilation and x_dilation[1:],
            kernel_dilation=kernel_dilation and kernel_dilation[1:],
        )
        slices = jnp.moveaxis(out, 1, -1).reshape(*images.shape[:2], *out.shape[2:], -1)
        return jnp.moveaxis(depth.sum_of_taps(slices) if sums_taps else slices, -1, 1)
    dims = range(2, x.ndim)
    spatial = "DHW"[-len(dims) :]
    out = lax.conv_general_dilated(
        x.transpose(0, *dims, 1),
        kernel.transpose(*dims, 1, 0),
        window_strides=stride,
        padding=padding,
        lhs_dilation=x_dilation,
        rhs_dilation=kernel_dilation,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=groups,
    )
    return out.transpose(0, x.ndim - 1, *range(1, x.ndim - 1))


def gradient_by_kernel(
    grad: jax.Array, x: jax.Array, kernel_size: Sizes, *, stride: Sizes, padding: Sizes, dilation: Sizes
) -> jax.Array:
    """(O, C, …) from ``grad`` (N, O, …) and ``x`` (N, C, …): a convolution of x by the gradient, samples and channels swapped.

    A function that XLA does not inline: it would make the operands, which it has, once more for their other order, element by
    element across the whole array.
    """
    images, grads = jnp.moveaxis(x, 1, -1), jnp.moveaxis(grad, 1, -1)
    sizes = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    with not_inlined():
        by_kernel = _gradient_by_kernel(grads, images, **{name: tuple(values) for name, values in sizes.items()})
    return jnp.moveaxis(by_kernel, (-1, 0), (0, 1))


@dataclass(frozen=True)
class _Depth:
    """A convolution's way along the depth of volumes."""

    taps: int
    stride: int
    dilation: int
    padding: tuple[int, int]
    x_dilation: int = 1

    def as_channels(self, x: jax.Array) -> jax.Array:
        """(N, slices of the result, H, W, taps · C) of ``x`` (N, D, H, W, C)."""
        whole = _deeper(x, *self.padding, self.x_dilation - 1)
        slices = (whole.shape[1] - (self.taps - 1) * self.dilation - 1) // self.stride + 1
        starts = [tap * self.dilation for tap in range(self.taps)]
        return jnp.concatenate([whole[:, start : start + (slices - 1) * self.stride + 1 : self.stride] for start in starts], -1)

    def sums_taps(self, channels: int, channels_out: int) -> bool:
        """Whether slices are convolved by all taps at once: the results of these are summed, else what they see is copied."""
        return self.stride == 1 and channels_out <= 2 * channels

    def sum_of_taps(self, x: jax.Array) -> jax.Array:
        """The result (N, slices, H, W, O) from what each tap makes of each slice, ``x`` (N, D, H, W, taps · O).

        In a function that XLA does not inline: it would sum anew in each op that reads the result.
        """
        with not_inlined():
            return _sum_of_taps(x, depth=self)

    def taps_of(self, grad: jax.Array, slices: int) -> jax.Array:
        """(N, slices, H, W, taps · O) of ``grad`` (N, …, O): for each slice of an image what it gave to, by tap."""
        lows = [tap * self.dilation - self.padding[0] for tap in range(self.taps)]
        return jnp.concatenate([_deeper(grad, low, slices - low - grad.shape[1]) for low in lows], -1)


def _deeper(x: jax.Array, low: int, high: int, interior: int = 0) -> jax.Array:
    """``x`` (N, D, H, W, C) with so many slices of zeros before, after and between its own; less than none cut some off."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(low, high, interior) if dim == 1 else (0, 0, 0) for dim in range(5)])


# without compiler_options: a part of the program that it is traced into
@functools.partial(jax.jit, static_argnames="depth")
def _sum_of_taps(x: jax.Array, *, depth: _Depth) -> jax.Array:
    """:meth:`_Depth.sum_of_taps`, channels last."""
    begin, end = depth.padding
    size = (x.shape[1] - 1) * depth.x_dilation + 1
    slices = begin + size + end - (depth.taps - 1) * depth.dilation
    lows = [begin - tap * depth.dilation for tap in range(depth.taps)]
    by_tap = zip(jnp.split(x, depth.taps, -1), lows, strict=True)
    given = (_deeper(one, low, slices - low - size, depth.x_dilation - 1) for one, low in by_tap)
    return functools.reduce(operator.add, given)


# without compiler_options: a part of the program that it is traced into
@functools.partial(jax.jit, static_argnames=("kernel_size", "stride", "padding", "dilation"))
def _gradient_by_kernel(
    grad: jax.Array, x: jax.Array, *, kernel_size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> jax.Array:
    """(C, …, O) from ``grad`` (N, …, O) and ``x`` (N, …, C)."""
    if x.ndim == 5:
        depth = _Depth(kernel_size[0], stride[0], dilation[0], (padding[0], padding[0]))
        sums_taps = depth.sums_taps(x.shape[-1], grad.shape[-1])
        images = x if sums_taps else depth.as_channels(x)[:, : grad.shape[1]]
        grads = depth.taps_of(grad, x.shape[1]) if sums_taps else grad
        by_kernel = _gradient_by_kernel(
            grads.reshape(-1, *grads.shape[2:]),
            images.reshape(-1, *images.shape[2:]),
            kernel_size=kernel_size[1:],
            stride=stride[1:],
            padding=padding[1:],
            dilation=dilation[1:],
        )
        if sums_taps:
            return jnp.moveaxis(by_kernel.reshape(*by_kernel.shape[:-1], kernel_size[0], -1), -2, 1)
        return by_kernel.reshape(kernel_size[0], -1, *by_kernel.shape[1:]).swapaxes(0, 1)
    reach = [
        (size - 1) * step + (taps - 1) * spread + 1
        for size, step, taps, spread in zip(grad.shape[1:-1], stride, kernel_size, dilation, strict=True)
    ]
    dims = range(1, x.ndim - 1)
    spatial = "DHW"[-len(dims) :]
    return lax.conv_general_dilated(
        x.transpose(x.ndim - 1, *dims, 0),
        grad.transpose(*dims, 0, x.ndim - 1),
        window_strides=dilation,
        padding=[(p, r - size - p) for p, r, size in zip(padding, reach, x.shape[1:-1], strict=True)],
        rhs_dilation=stride,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
    )
