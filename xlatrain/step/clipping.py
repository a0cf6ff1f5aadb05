"""Gradient clipping, as ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` do it."""

from __future__ import annotations

import math
from typing import TypeVar

import jax
import jax.numpy as jnp

Gradients = TypeVar("Gradients")
Scalar = float | jax.Array


def clip_by_norm(grads: Gradients, max_norm: Scalar, norm_type: float = 2.0) -> tuple[Gradients, jax.Array]:
    """Scale gradients down so that their total norm is at most ``max_norm``.

    Multiplies by ``min(1, max_norm / (total_norm + 1e-6))``. A norm that is not finite makes the gradients so too, as with
    ``error_if_nonfinite=False`` in https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html.

    Args:
        grads: pytree of arrays; None leaves stay None.
        max_norm: a number or a scalar array, which may be an input of the program.
        norm_type: the p of the p-norm; ``math.inf`` for the largest absolute value.

    Returns:
        The gradients in their dtypes, and the total norm before clipping, float32 (float64 where a gradient is).
    """
    total = total_norm(grads, norm_type)
    factor = jnp.minimum(jnp.asarray(max_norm, total.dtype) / (total + 1e-6), 1.0)
    return jax.tree.map(lambda grad: _scaled(grad, factor), grads), total


def clip_by_value(grads: Gradients, max_value: Scalar) -> Gradients:
    """Clamp every element of the gradients to ``[-max_value, max_value]``; None leaves stay None.

    Args:
        grads: pytree of real arrays, whose dtypes are kept.
        max_value: a number or a scalar array.

    Raises:
        ValueError: a complex gradient, which has no order.
    """

    def clamp(path: tuple[object, ...], grad: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(grad):
            raise ValueError(
                f"clip_by_value: gradient {jax.tree_util.keystr(path)} is {grad.dtype}, and complex numbers have no order; "
                "use clip_by_norm"
            )
        bound = jnp.asarray(max_value, grad.dtype)
        return jnp.clip(grad, -bound, bound)

    return jax.tree_util.tree_map_with_path(clamp, grads)


def total_norm(grads: object, norm_type: float = 2.0) -> jax.Array:
    """The norm of all gradients (pytree of arrays) seen as one vector: the norm of their norms. Zero where there are none.

    Returns:
        A float32 scalar; float64 where a gradient is of 64 bits.
    """
    leaves = jax.tree.leaves(grads)
    if not leaves:
        return jnp.zeros((), jnp.float32)
    norms = [_norm(jnp.abs(_widened(leaf)), float(norm_type)) for leaf in leaves]
    widest = jnp.result_type(*norms)
    return _norm(jnp.stack([norm.astype(widest) for norm in norms]), float(norm_type))


def _norm(magnitudes: jax.Array, norm_type: float) -> jax.Array:
    """The p-norm of an array of magnitudes, as a scalar of its dtype; ``norm_type`` may be 0, ``math.inf`` or ``-math.inf``."""
    if magnitudes.size == 0:
        return jnp.zeros((), magnitudes.dtype)
    if norm_type == math.inf:
        return jnp.max(magnitudes)
    if norm_type == -math.inf:
        return jnp.min(magnitudes)
    if norm_type == 0:
        return jnp.sum(magnitudes != 0).astype(magnitudes.dtype)
    if norm_type == 2:
        return jnp.sqrt(jnp.sum(jnp.square(magnitudes)))
    return jnp.power(jnp.sum(jnp.power(magnitudes, norm_type)), 1 / norm_type)


def _widened(grad: jax.Array) -> jax.Array:
    """The gradient as at least float32; complex stays complex."""
    return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))


def _scaled(grad: jax.Array, factor: jax.Array) -> jax.Array:
    """The gradient times ``factor`` (float scalar), computed as at least float32, in the gradient's own dtype."""
    wide = _widened(grad)
    return (wide * factor.astype(wide.real.dtype)).astype(grad.dtype)
