"""Convolutions and their gradients in the one form for which XLA:CPU has fast code: channels last, the kernel's before them.

XLA:CPU brings other forms into this one only in a program's entry computation. Inside a loop, as of rolled layers, what it finds
in another form runs in a naive loop nest, 16 times slower with the gradients (``benchmarks/notes/speed_on_cpu.md``).

It has none for volumes, which take 5 to 12 times as long as in torch. They become images: a slice of the result is that of an
image which has what the kernel sees along the depth as its channels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

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
        images = depth.as_channels(x)
        out = convolution(
            images.reshape(-1, *images.shape[2:]),
            kernel.swapaxes(1, 2).reshape(kernel.shape[0], -1, *kernel.shape[3:]),
            stride=stride[1:],
            padding=padding[1:],
            x_dilation=x_dilation and x_dilation[1:],
            kernel_dilation=kernel_dilation and kernel_dilation[1:],
        )
        return out.reshape(*images.shape[:2], *out.shape[1:]).swapaxes(1, 2)
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

    On a single device a function that XLA does not inline: it would make the operands, which it has, once more for their other
    order, element by element across the whole array. On several its sum over samples is a collective, and XLA:CPU 0.10 crashes
    where collectives of several processes are in functions.
    """
    if x.ndim == 5:
        images = _Depth(kernel_size[0], stride[0], dilation[0], (padding[0], padding[0])).as_channels(x)[:, : grad.shape[2]]
        grads = grad.swapaxes(1, 2)
        by_kernel = gradient_by_kernel(
            grads.reshape(-1, *grads.shape[2:]),
            images.reshape(-1, *images.shape[2:]),
            kernel_size[1:],
            stride=stride[1:],
            padding=padding[1:],
            dilation=dilation[1:],
        )
        return by_kernel.reshape(grad.shape[1], kernel_size[0], x.shape[1], *kernel_size[1:]).swapaxes(1, 2)
    reach = [
        (size - 1) * step + (taps - 1) * spread + 1
        for size, step, taps, spread in zip(grad.shape[2:], stride, kernel_size, dilation, strict=True)
    ]
    pads = tuple((p, r - size - p) for p, r, size in zip(padding, reach, x.shape[2:], strict=True))
    images, grads = jnp.moveaxis(x, 1, -1), jnp.moveaxis(grad, 1, -1)
    with set_xla_metadata(inlineable="false") if jax.device_count() == 1 else contextlib.nullcontext():
        by_kernel = _gradient_by_kernel(grads, images, stride=tuple(dilation), pads=pads, dilation=tuple(stride))
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
        """(N, slices of the result, taps · C, H, W) of ``x`` (N, C, D, H, W)."""
        whole = lax.pad(
            x, jnp.zeros((), x.dtype), [(*self.padding, self.x_dilation - 1) if dim == 2 else (0, 0, 0) for dim in range(5)]
        )
        slices = (whole.shape[2] - (self.taps - 1) * self.dilation - 1) // self.stride + 1
        starts = [tap * self.dilation for tap in range(self.taps)]
        seen = [whole[:, :, start : start + (slices - 1) * self.stride + 1 : self.stride] for start in starts]
        return jnp.concatenate(seen, 1).swapaxes(1, 2)


# without compiler_options: a part of the program that it is traced into
@functools.partial(jax.jit, static_argnames=("stride", "pads", "dilation"))
def _gradient_by_kernel(
    grad: jax.Array, x: jax.Array, *, stride: Sizes, pads: tuple[tuple[int, int], ...], dilation: Sizes
) -> jax.Array:
    """(C, …, O) from ``grad`` (N, …, O) and ``x`` (N, …, C)."""
    dims = range(1, x.ndim - 1)
    spatial = "DHW"[-len(dims) :]
    return lax.conv_general_dilated(
        x.transpose(x.ndim - 1, *dims, 0),
        grad.transpose(*dims, 0, x.ndim - 1),
        window_strides=stride,
        padding=pads,
        rhs_dilation=dilation,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
    )
