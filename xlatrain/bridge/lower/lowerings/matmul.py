"""Matrix products, also of groups. Their precision is JAX's ambient setting (``jax.default_matmul_precision``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

import xlatrain.bridge.capture.decompositions.grouped_matmul
import xlatrain.bridge.capture.eight_bits  # noqa: F401  defines the op
from xlatrain.bridge.lower.lowerings.activation import exact_gelu
from xlatrain.bridge.lower.operands import Number, accumulate_dtype, cast
from xlatrain.bridge.lower.registry import lowers
from xlatrain.bridge.tensors.dtypes import jax_dtype


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b)


def _affine(x: jax.Array, product: jax.Array, beta: Number, alpha: Number, dtype: np.dtype) -> jax.Array:
    """``beta * x + alpha * product`` in ``dtype``, broadcast; ``x`` is not read when beta is 0, NaN included."""
    scaled = product if alpha == 1 else product * cast(alpha, product.dtype)
    if beta == 0:
        return scaled.astype(dtype)
    x = x.astype(product.dtype)
    return ((x if beta == 1 else x * cast(beta, x.dtype)) + scaled).astype(dtype)


def _wide_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product before it is rounded to 16 bits, in float32 for 16-bit floats: a following sum rounds once, as in torch."""
    return jnp.matmul(a, b, preferred_element_type=accumulate_dtype(a.dtype))


@lowers("aten.mm.default", "aten.bmm.default")
def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return _product(a, b)


@lowers("aten.mm.dtype", "aten.bmm.dtype")
def matmul_dtype(a: jax.Array, b: jax.Array, out_dtype: torch.dtype) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jax_dtype(out_dtype))


@lowers("aten.addmm.default", "aten.addmv.default")
def addmm(x: jax.Array, a: jax.Array, b: jax.Array, *, beta: Number = 1, alpha: Number = 1) -> jax.Array:
    return _affine(x, _wide_product(a, b), beta, alpha, np.dtype(a.dtype))


@lowers("aten.addbmm.default")
def addbmm(x: jax.Array, a: jax.Array, b: jax.Array, *, beta: Number = 1, alpha: Number = 1) -> jax.Array:
    """The products summed over the batch."""
    product = jnp.einsum("bij,bjk->ik", a, b, preferred_element_type=accumulate_dtype(a.dtype))
    return _affine(x, product, beta, alpha, np.dtype(a.dtype))


@lowers("aten._addmm_activation.default")
def addmm_activation(
    x: jax.Array, a: jax.Array, b: jax.Array, *, beta: Number = 1, alpha: Number = 1, use_gelu: bool = False
) -> jax.Array:
    value = _affine(x, _wide_product(a, b), beta, alpha, accumulate_dtype(a.dtype))
    return (exact_gelu(value) if use_gelu else jax.nn.relu(value)).astype(a.dtype)


@lowers("aten._int_mm.default")
def int_mm(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.int32)


@lowers("aten._trilinear.default")
def trilinear(
    i1: jax.Array, i2: jax.Array, i3: jax.Array, expand1: list[int], expand2: list[int], expand3: list[int], sumdim: list[int],
    unroll_dim: int = 1,
) -> jax.Array:  # fmt: skip
    """The product of three tensors, each given size-1 dims at ``expand``, summed over ``sumdim``. ``unroll_dim`` is a hint."""
    del unroll_dim
    rank = i1.ndim + len(expand1)

    def labels(x: jax.Array, expand: list[int]) -> list[int]:
        return [d for d in range(rank) if d not in [e % rank for e in expand]]

    summed = {d % rank for d in sumdim}
    kept = [d for d in range(rank) if d not in summed]
    return jnp.einsum(i1, labels(i1, expand1), i2, labels(i2, expand2), i3, labels(i3, expand3), kept)


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


@lowers("xlatrain.eight_bit_product.default")
def eight_bit_product(a: jax.Array, b: jax.Array, a_dims: list[int], b_dims: list[int]) -> jax.Array:
    """The product over these dims: of int8 in int32, of float8 in float32. Passes of float32's precision are not for them."""
    wide = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    contracted = (tuple(a_dims), tuple(b_dims)), ((), ())
    return lax.dot_general(a, b, contracted, precision=lax.Precision.DEFAULT, preferred_element_type=wide)
