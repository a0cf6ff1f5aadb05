"""Layer and group normalisation, with the statistics that their backward uses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.registry import lowers


def _wide(x: jax.Array) -> jax.Array:
    """``x`` in float32 where it is a 16-bit float: torch normalises these in float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@lowers("aten.native_layer_norm.default")
def native_layer_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Result, mean and 1 / standard deviation; the statistics keep the normalised dims with size 1."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = _wide(x)
    mean = jnp.mean(wide, axis=axes, keepdims=True)
    centered = wide - mean
    rstd = lax.rsqrt(jnp.mean(jnp.square(centered), axis=axes, keepdims=True) + eps)
    out = centered * rstd
    if weight is not None:
        out = out * weight.astype(wide.dtype)
    if bias is not None:
        out = out + bias.astype(wide.dtype)
    return out.astype(x.dtype), mean, rstd


@lowers("aten.native_layer_norm_backward.default")
def native_layer_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Gradients by input, weight and bias; None for those that ``output_mask`` leaves out."""
    first = x.ndim - len(normalized_shape)
    axes, lead = tuple(range(first, x.ndim)), tuple(range(first))
    grad, wide = _wide(grad), _wide(x)
    normalized = (wide - mean.astype(wide.dtype)) * rstd.astype(wide.dtype)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * weight.astype(wide.dtype)
        mean_grad = jnp.mean(scaled, axis=axes, keepdims=True)
        mean_product = jnp.mean(scaled * normalized, axis=axes, keepdims=True)
        grad_x = (rstd.astype(wide.dtype) * (scaled - mean_grad - normalized * mean_product)).astype(x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = jnp.sum(grad * normalized, axis=lead).astype(weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = jnp.sum(grad, axis=lead).astype(bias.dtype)
    return grad_x, grad_weight, grad_bias


def _grouped(x: jax.Array, n: int, group: int) -> jax.Array:
    """``x`` (N, C, …) as (n, group, elements of a group), in at least float32."""
    return _wide(x).reshape(n, group, math.prod(x.shape[1:]) // group)


def _per_channel(values: jax.Array, ndim: int) -> jax.Array:
    """Values (C,) as (1, C, 1, …), to broadcast over ``ndim`` dims."""
    return values.reshape(1, -1, *(1,) * (ndim - 2))


@lowers("aten.native_group_norm.default")
def native_group_norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Result, mean and 1 / standard deviation, the latter of shape (n, group)."""
    grouped = _grouped(x, n, group)
    mean = jnp.mean(grouped, axis=-1)
    centered = grouped - mean[..., None]
    rstd = lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1) + eps)
    out = (centered * rstd[..., None]).reshape(x.shape)
    if weight is not None:
        out = out * _per_channel(_wide(weight), x.ndim)
    if bias is not None:
        out = out + _per_channel(_wide(bias), x.ndim)
    return out.astype(x.dtype), mean.astype(x.dtype), rstd.astype(x.dtype)


@lowers("aten.native_group_norm_backward.default")
def native_group_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Gradients by input, weight and bias; None for those that ``output_mask`` leaves out."""
    wide_grad = _wide(grad)
    normalized = (_grouped(x, n, group) - _wide(mean).reshape(n, group, 1)) * _wide(rstd).reshape(n, group, 1)
    not_channel = (0, *range(2, x.ndim))
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = wide_grad if weight is None else wide_grad * _per_channel(_wide(weight), x.ndim)
        scaled = scaled.reshape(normalized.shape)
        mean_grad = jnp.mean(scaled, axis=-1, keepdims=True)
        mean_product = jnp.mean(scaled * normalized, axis=-1, keepdims=True)
        grad_x = (_wide(rstd).reshape(n, group, 1) * (scaled - mean_grad - normalized * mean_product)).reshape(x.shape)
        grad_x = grad_x.astype(x.dtype)
    if output_mask[1]:
        grad_weight = jnp.sum(wide_grad * normalized.reshape(x.shape), axis=not_channel).astype(grad.dtype)
    if output_mask[2]:
        grad_bias = jnp.sum(wide_grad, axis=not_channel).astype(grad.dtype)
    assert math.prod(x.shape) == n * c * hxw
    return grad_x, grad_weight, grad_bias


@lowers("aten._weight_norm_interface_backward.default")
def weight_norm_interface_backward(
    grad: jax.Array, v: jax.Array, g: jax.Array, norms: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    """Gradients by direction ``v`` and length ``g`` of ``w = g * v / |v|``, norms over all dims but ``dim``."""
    axes = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    norms = norms.reshape(g.shape).astype(v.dtype)
    along = jnp.sum(grad * v, axis=axes, keepdims=True)
    grad_v = g / norms * (grad - v * along / jnp.square(norms))
    return grad_v, along / norms
