"""Pairwise distances of the rows of two matrices (``cdist``) and of one (``pdist``), and their backward."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.bridge.lower.registry import lowers


def _norm(difference: jax.Array, p: float) -> jax.Array:
    """The p-norm over the last dim: (…, n) → (…)."""
    size = jnp.abs(difference)
    if p == 0:
        return jnp.sum(difference != 0, axis=-1).astype(difference.dtype)
    if p == 1:
        return jnp.sum(size, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(jnp.square(difference), axis=-1))
    if math.isinf(p):
        return jnp.max(size, axis=-1, initial=0)
    return jnp.sum(size**p, axis=-1) ** (1 / p)


def _norm_gradient(difference: jax.Array, distance: jax.Array, grad: jax.Array, p: float) -> jax.Array:
    """``grad`` (…) of the norm by ``difference`` (…, D); zero where the distance is zero."""
    distance, grad = distance[..., None], grad[..., None]
    if p == 0:
        return jnp.zeros_like(difference)
    safe = jnp.where(distance == 0, 1, distance)
    size = jnp.abs(difference)
    if p == 1:
        unit = jnp.sign(difference)
    elif math.isinf(p):
        unit = jnp.sign(difference) * (size == distance)
    elif p == 2:
        unit = difference / safe
    elif p < 2:
        # a zero difference has an infinite slope below p = 1, where torch takes zero as well
        powered = jnp.where(size == 0, 0, jnp.where(size == 0, 1, size) ** (p - 1))
        unit = jnp.sign(difference) * powered / safe ** (p - 1)
    else:
        unit = difference * size ** (p - 2) / safe ** (p - 1)
    return jnp.where(distance == 0, 0, grad * unit)


@lowers("aten._cdist_forward.default")
def cdist_forward(x1: jax.Array, x2: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    """(…, P, D) and (…, R, D) → (…, P, R), always by differences: torch's matrix-product form for p = 2 approximates them."""
    return _norm(x1[..., :, None, :] - x2[..., None, :, :], p)


@lowers("aten._cdist_backward.default")
def cdist_backward(grad: jax.Array, x1: jax.Array, x2: jax.Array, p: float, distance: jax.Array) -> jax.Array:
    """The gradient by ``x1``."""
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    return jnp.sum(_norm_gradient(difference, distance, grad, p), axis=-2)


def _pairs(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(rows, k=1)


@lowers("aten._pdist_forward.default")
def pdist_forward(x: jax.Array, p: float = 2) -> jax.Array:
    """(N, D) → (N (N - 1) / 2,), the pairs i < j in order."""
    first, second = _pairs(x.shape[0])
    return _norm(x[first] - x[second], p)


@lowers("aten._pdist_backward.default")
def pdist_backward(grad: jax.Array, x: jax.Array, p: float, distance: jax.Array) -> jax.Array:
    first, second = _pairs(x.shape[0])
    by_pair = _norm_gradient(x[first] - x[second], distance, grad, p)
    return jnp.zeros_like(x).at[first].add(by_pair).at[second].add(-by_pair)
