"""Convolutions of one to three spatial dims, transposed ones and their backward, by ``lax.conv_general_dilated``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.registry import lowers

_SPATIAL = "DHW"


def _per_dim(values: Sequence[int], dims: int) -> tuple[int, ...]:
    """torch's list of one or ``dims`` numbers, as ``dims`` numbers."""
    values = tuple(values)
    return values * dims if len(values) == 1 else values


def _dimension_numbers(dims: int) -> tuple[str, str, str]:
    spatial = _SPATIAL[-dims:]
    return f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"


def _forward(
    x: jax.Array, weight: jax.Array, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> jax.Array:
    """``x`` (N, C_in, …) by ``weight`` (C_out, C_in / groups, …)."""
    return lax.conv_general_dilated(
        x,
        weight,
        window_strides=stride,
        padding=[(p, p) for p in padding],
        rhs_dilation=dilation,
        dimension_numbers=_dimension_numbers(len(stride)),
        feature_group_count=groups,
    )


def _pointwise(x: jax.Array, weight: jax.Array, stride: tuple[int, ...]) -> jax.Array:
    """The same for a kernel of size 1 without padding or groups, as one matrix product for each sample.

    XLA:CPU takes 1.4 to 3 times as long for it as a convolution (``docs/design/0012-speed-on-cpu.md``).
    """
    kept = x[(slice(None), slice(None), *(slice(None, None, step) for step in stride))]
    n, c_in, *spatial = kept.shape
    matrix = jnp.broadcast_to(weight.reshape(weight.shape[0], c_in), (n, weight.shape[0], c_in))
    return jnp.matmul(matrix, kept.reshape(n, c_in, -1)).reshape(n, weight.shape[0], *spatial)


def _is_pointwise(weight: jax.Array, padding: tuple[int, ...], transposed: bool, groups: int) -> bool:
    return not transposed and groups == 1 and set(weight.shape[2:]) == {1} and set(padding) == {0} and weight.size > 0


def _transposed(
    x: jax.Array,
    weight: jax.Array,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    output_padding: tuple[int, ...],
    groups: int,
) -> jax.Array:
    """``x`` (N, C_in, …) by ``weight`` (C_in, C_out / groups, …): the gradient of a convolution by its input."""
    kernel = weight.shape[2:]
    c_in, c_out_per_group = weight.shape[:2]
    grouped = weight.reshape(groups, c_in // groups, c_out_per_group, *kernel).swapaxes(1, 2)
    turned = jnp.flip(grouped.reshape(groups * c_out_per_group, c_in // groups, *kernel), range(2, weight.ndim))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return lax.conv_general_dilated(
        x,
        turned,
        window_strides=(1,) * len(stride),
        padding=[(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding, strict=True)],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=_dimension_numbers(len(stride)),
        feature_group_count=groups,
    )


@lowers("aten.convolution.default", "aten.convolution_overrideable.default")
def convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.conv2d.html"""
    dims = x.ndim - 2
    window = _per_dim(stride, dims), _per_dim(padding, dims), _per_dim(dilation, dims)
    weight = weight.astype(x.dtype)
    if transposed:
        out = _transposed(x, weight, *window, _per_dim(output_padding, dims), groups)
    elif _is_pointwise(weight, window[1], transposed, groups):
        out = lax.platform_dependent(
            x,
            weight,
            cpu=lambda x, weight: _pointwise(x, weight, window[0]),
            default=lambda x, weight: _forward(x, weight, *window, groups),
        )
    else:
        out = _forward(x, weight, *window, groups)
    return out if bias is None else out + bias.reshape(1, -1, *(1,) * dims).astype(out.dtype)


@lowers("aten.convolution_backward.default", "aten.convolution_backward_overrideable.default")
def convolution_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Gradients by input, weight and bias; None for those that ``output_mask`` leaves out.

    A convolution is linear in each argument: each gradient is JAX's transpose of it, without computing the forward again.
    """

    dims = x.ndim - 2
    window = _per_dim(stride, dims), _per_dim(padding, dims), _per_dim(dilation, dims)

    def forward(x: jax.Array, weight: jax.Array) -> jax.Array:
        if transposed:
            return _transposed(x, weight, *window, _per_dim(output_padding, dims), groups)
        return _forward(x, weight, *window, groups)

    def pointwise(x: jax.Array, weight: jax.Array) -> jax.Array:
        return _pointwise(x, weight, window[0])

    grad = grad.astype(x.dtype)
    weight = weight.astype(x.dtype)
    operands = grad, x, weight
    if _is_pointwise(weight, window[1], transposed, groups):
        by_input, by_weight = lax.platform_dependent(
            *operands, cpu=_transposes(pointwise, output_mask), default=_transposes(forward, output_mask)
        )
    else:
        by_input, by_weight = _transposes(forward, output_mask)(*operands)
    grad_bias = jnp.sum(grad, axis=(0, *range(2, grad.ndim))) if output_mask[2] else None
    return by_input, by_weight, grad_bias


def _transposes(
    forward: Callable[[jax.Array, jax.Array], jax.Array], wanted: Sequence[bool]
) -> Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array | None, jax.Array | None]]:
    """``(gradient of the result, x, weight) ->`` gradients by x and weight of what is linear in each; None where not wanted."""

    def gradients(grad: jax.Array, x: jax.Array, weight: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        by_input = jax.linear_transpose(lambda x: forward(x, weight), x)(grad)[0] if wanted[0] else None
        by_weight = jax.linear_transpose(lambda weight: forward(x, weight), weight)(grad)[0] if wanted[1] else None
        return by_input, by_weight

    return gradients
