"""Factorisations for solving linear systems: Cholesky, LU, triangular solves, inverses.

XLA cannot raise from inside a program: where torch raises for a singular or indefinite matrix, the result is inf or NaN, and
``info`` is 0 for success and positive for failure.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import promote
from xlatrain.bridge.lower.registry import lowers


def _adjoint(x: jax.Array) -> jax.Array:
    """The conjugate transpose of the last two dims."""
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _info(failed: jax.Array) -> jax.Array:
    return failed.astype(jnp.int32)


@lowers("aten._linalg_check_errors.default")
def check_errors(info: jax.Array, api_name: str, *, is_matrix: bool) -> None:
    """Would raise on the host; see the module's docstring."""
    del info, api_name, is_matrix


@lowers("aten.linalg_cholesky_ex.default")
def cholesky_ex(x: jax.Array, *, upper: bool = False, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    del check_errors
    factor = cholesky(x, upper)
    return factor, _info(jnp.any(jnp.isnan(factor), axis=(-2, -1)))


@lowers("aten.cholesky.default")
def cholesky(x: jax.Array, upper: bool = False) -> jax.Array:
    """Reads only the lower triangle (the upper one with ``upper``)."""
    lower = lax.linalg.cholesky(_adjoint(x) if upper else x, symmetrize_input=False)
    return _adjoint(lower) if upper else lower


@lowers("aten.cholesky_solve.default", "aten._cholesky_solve_helper.default")
def cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    b, factor = _batched(b, factor)
    lower = _adjoint(factor) if upper else factor
    half = lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)
    return lax.linalg.triangular_solve(lower, half, left_side=True, lower=True, transpose_a=True, conjugate_a=True)


@lowers("aten.cholesky_inverse.default")
def cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    identity = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return cholesky_solve(identity, factor, upper)


def _batched(b: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Broadcast the batch dims of ``b`` (..., M, K) and ``a`` (..., M, M) to a common shape, and promote their dtypes."""
    b, a = promote(b, a)
    batch = jnp.broadcast_shapes(b.shape[:-2], a.shape[:-2])
    return jnp.broadcast_to(b, batch + b.shape[-2:]), jnp.broadcast_to(a, batch + a.shape[-2:])


@lowers("aten.linalg_solve_triangular.default")
def solve_triangular(a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False) -> jax.Array:
    b, a = _batched(b, a)
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@lowers("aten.triangular_solve.default")
def triangular_solve(
    b: jax.Array, a: jax.Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Solve for ``a`` (..., M, M) and ``b`` (..., M, K); the matrix itself is returned too, as in torch."""
    b, a = _batched(b, a)
    x = lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, conjugate_a=False, unit_diagonal=unitriangular
    )
    return x, a


def _lu(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The LU factorization of ``x`` (..., M, N).

    Returns:
        L and U in one matrix (..., M, N); the pivots, counted from 1 as in LAPACK, int32 (..., min(M, N)); the permutation of the
        rows, int32 (..., M).
    """
    if x.size == 0:
        n = min(x.shape[-2:])
        rows = jnp.broadcast_to(jnp.arange(x.shape[-2], dtype=jnp.int32), x.shape[:-1])
        return x, rows[..., :n] + 1, rows
    lu, pivots, permutation = lax.linalg.lu(x)
    return lu, pivots + 1, permutation


def _singular(lu: jax.Array) -> jax.Array:
    """Whether a diagonal element of U is zero: bool (...)."""
    return jnp.any(jnp.diagonal(lu, axis1=-2, axis2=-1) == 0, axis=-1)


@lowers("aten.linalg_lu_factor_ex.default")
def lu_factor_ex(x: jax.Array, *, pivot: bool = True, check_errors: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``pivot=False`` is refused by torch itself on CPU."""
    del pivot, check_errors
    lu, pivots, _ = _lu(x)
    return lu, pivots, _info(_singular(lu))


@lowers("aten.linalg_lu.default")
def lu(x: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    """P, L, U with ``P @ L @ U == x``."""
    del pivot
    packed, pivots, _ = _lu(x)
    return lu_unpack(packed, pivots)


def _permutation(pivots: jax.Array, rows: int) -> jax.Array:
    """The permutation of ``rows`` rows, int32 (..., rows), of pivots counted from 1."""
    return lax.linalg.lu_pivots_to_permutation(pivots.astype(jnp.int32) - 1, rows)


@lowers("aten.lu_unpack.default")
def lu_unpack(
    packed: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """P, L and U of a packed factorization (..., M, N); parts that are not asked for are empty tensors."""
    rows, cols = packed.shape[-2:]
    k = min(rows, cols)
    empty = jnp.zeros((0,), packed.dtype)
    p, low, up = empty, empty, empty
    if unpack_data:
        low = jnp.tril(packed[..., :, :k], -1) + jnp.eye(rows, k, dtype=packed.dtype)
        up = jnp.triu(packed[..., :k, :])
    if unpack_pivots:
        p = jnp.swapaxes(jax.nn.one_hot(_permutation(pivots, rows), rows, dtype=packed.dtype), -1, -2)
    return p, low, up


@lowers("aten.linalg_lu_solve.default")
def lu_solve(packed: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False) -> jax.Array:
    if not left:  # x A = b is A^H x^H = b^H
        return _adjoint(lu_solve(packed, pivots, _adjoint(b), adjoint=not adjoint))
    b, packed = _batched(b, packed)
    pivots = jnp.broadcast_to(pivots, packed.shape[:-1])
    if packed.size == 0 or b.size == 0:
        return b
    permutation = _permutation(pivots, packed.shape[-1])
    lower = {"left_side": True, "lower": True, "unit_diagonal": True}
    upper = {"left_side": True, "lower": False}
    if not adjoint:
        b = jnp.take_along_axis(b, permutation[..., None], axis=-2)
        return lax.linalg.triangular_solve(packed, lax.linalg.triangular_solve(packed, b, **lower), **upper)
    turned = {"transpose_a": True, "conjugate_a": True}
    y = lax.linalg.triangular_solve(packed, b, **upper, **turned)
    z = lax.linalg.triangular_solve(packed, y, **lower, **turned)
    return jnp.take_along_axis(z, jnp.argsort(permutation, axis=-1)[..., None], axis=-2)


@lowers("aten.linalg_inv_ex.default")
def inv_ex(x: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    del check_errors
    packed, pivots, _ = _lu(x)
    identity = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)
    return lu_solve(packed, pivots, identity), _info(_singular(packed))
