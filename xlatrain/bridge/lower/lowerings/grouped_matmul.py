"""Grouped matrix products, by ``lax.ragged_dot``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import xlatrain.bridge.capture.decompositions.grouped_matmul  # noqa: F401  defines the ops
from xlatrain.bridge.lower.registry import lowers

_RAGGED_CONTRACTION = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@lowers("xlatrain.grouped_mm.default")
def grouped_mm(a: jax.Array, b: jax.Array, offs: jax.Array | None) -> jax.Array:
    """Products of groups; ``offs[i]`` is where group i ends in the dim that is shared out:

    - ``a`` (M, K), ``b`` (G, K, N): rows of ``a`` → (M, N); rows after the last group are zero
    - ``a`` (G, M, K), ``b`` (K, N): columns of ``b`` → (M, N)
    - ``a`` (M, K), ``b`` (K, N): the contracted dim → (G, M, N)
    - ``a`` (G, M, K), ``b`` (G, K, N), no ``offs`` → (G, M, N)
    """
    if offs is None:
        return jnp.matmul(a, b)
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=jnp.zeros(1, jnp.int32))
    if a.ndim == 2 and b.ndim == 3:
        return lax.ragged_dot(a, b, sizes)
    if a.ndim == 3 and b.ndim == 2:
        return lax.ragged_dot(b.T, jnp.swapaxes(a, 1, 2), sizes).T
    return lax.ragged_dot_general(a.T, b, sizes, _RAGGED_CONTRACTION)
