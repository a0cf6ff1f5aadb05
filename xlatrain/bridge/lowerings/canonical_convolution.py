"""Convolutions and their gradients in the one form for which XLA:CPU has fast code: channels last, the kernel's before them.

XLA:CPU brings other forms into this one only in a program's entry computation. Inside a loop, as of rolled layers, what it finds
in another form runs in a naive loop nest, 16 times slower with the gradients (``docs/design/0014-speed-on-cpu.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

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
    """(O, C, …) from ``grad`` (N, O, …) and ``x`` (N, C, …): a convolution of x by the gradient, samples and channels swapped."""
    reach = [
        (size - 1) * step + (taps - 1) * spread + 1
        for size, step, taps, spread in zip(grad.shape[2:], stride, kernel_size, dilation, strict=True)
    ]
    by_kernel = convolution(
        x.swapaxes(0, 1),
        grad.swapaxes(0, 1),
        stride=dilation,
        padding=[(p, r - size - p) for p, r, size in zip(padding, reach, x.shape[2:], strict=True)],
        kernel_dilation=stride,
    )
    return by_kernel.swapaxes(0, 1)
