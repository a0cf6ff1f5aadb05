"""Spectral and orthogonal factorisations: SVD, eigenvalues, QR, matrix exponential, pseudo-inverse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xlatrain.bridge.lower.operands import accumulate_dtype, default_complex, promote
from xlatrain.bridge.lower.registry import lowers


@lowers("aten._linalg_svd.default")
def svd(
    x: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """U, S, Vh. ``driver`` chooses among CUDA libraries."""
    del driver
    if compute_uv:
        u, s, vh = jnp.linalg.svd(x, full_matrices=full_matrices)
        return u, s, vh
    s = jnp.linalg.svd(x, compute_uv=False)
    return jnp.zeros((0,), x.dtype), s, jnp.zeros((0,), x.dtype)


@lowers("aten._linalg_eigh.default")
def eigh(x: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    """Ascending eigenvalues; only the triangle named by ``UPLO`` is read."""
    lower = UPLO.upper() == "L"
    triangle = jnp.tril(x) if lower else jnp.triu(x)
    strict = jnp.tril(x, -1) if lower else jnp.triu(x, 1)
    # The diagonal's imaginary part is not read.
    whole = triangle + jnp.conj(jnp.swapaxes(strict, -1, -2))
    if x.shape[-1] == 0:
        return jnp.zeros(x.shape[:-1], jnp.real(x).dtype), x
    vectors, values = lax.linalg.eigh(whole, symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


def _eig(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues (..., N) and eigenvectors (..., N, N), complex.

    XLA has the general eigenvalue problem on CPU and GPU, not on TPU, where JAX raises.
    """
    values, vectors = jnp.linalg.eig(x)
    return values, vectors


@lowers("aten.linalg_eig.default")
def eig(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _eig(x)


@lowers("aten._linalg_eigvals.default")
def eigvals(x: jax.Array) -> jax.Array:
    return jnp.linalg.eigvals(x).astype(jnp.promote_types(x.dtype, default_complex()))


@lowers("aten.linalg_qr.default")
def qr(x: jax.Array, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    """The QR decomposition of ``x`` (..., M, N); in mode ``r`` Q is empty."""
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return q, r


@lowers("aten.geqrf.default")
def geqrf(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """R above the diagonal, Householder vectors below it; and their factors."""
    reflectors, tau = jnp.linalg.qr(x, mode="raw")
    return jnp.swapaxes(reflectors, -1, -2), tau


@lowers("aten.linalg_householder_product.default")
def householder_product(x: jax.Array, tau: jax.Array) -> jax.Array:
    if x.size == 0:
        return x
    if tau.shape[-1] == 0:
        return jnp.broadcast_to(jnp.eye(*x.shape[-2:], dtype=x.dtype), x.shape)
    return lax.linalg.householder_product(x, tau)


@lowers("aten.ormqr.default")
def ormqr(x: jax.Array, tau: jax.Array, other: jax.Array, left: bool = True, transpose: bool = False) -> jax.Array:
    """``Q @ other`` (or from the right, or with Q's adjoint), with Q the full product of the reflectors."""
    rows = x.shape[-2]
    wide = jnp.pad(x[..., :, : tau.shape[-1]], [(0, 0)] * (x.ndim - 1) + [(0, rows - tau.shape[-1])])
    q = lax.linalg.householder_product(wide, tau)
    q = jnp.conj(jnp.swapaxes(q, -1, -2)) if transpose else q
    return q @ other if left else other @ q


@lowers("aten.linalg_matrix_exp.default")
def matrix_exp(x: jax.Array) -> jax.Array:
    return jax.scipy.linalg.expm(x.astype(accumulate_dtype(x.dtype))) if x.size else x


@lowers("aten.linalg_pinv.atol_rtol_tensor")
def pinv(x: jax.Array, *, atol: jax.Array | None = None, rtol: jax.Array | None = None, hermitian: bool = False) -> jax.Array:
    """Singular values up to ``max(atol, rtol * largest)`` count as 0. rtol: by default max(m, n) * eps, or 0 if atol is given."""
    if x.size == 0:
        return jnp.zeros((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)
    if hermitian:
        values, left = eigh(x)
        right, size = left, jnp.abs(values)
    else:
        left, values, vh = jnp.linalg.svd(x, full_matrices=False)
        right, size = jnp.conj(jnp.swapaxes(vh, -1, -2)), values
    largest = jnp.max(size, axis=-1, keepdims=True)
    limit = _limit(x, size.dtype, largest, atol, rtol)
    inverse = jnp.where(size > limit, 1 / jnp.where(size > limit, values, 1), 0).astype(x.dtype)
    return (right * inverse[..., None, :]) @ jnp.conj(jnp.swapaxes(left, -1, -2))


def _limit(x: jax.Array, dtype, largest: jax.Array, atol: jax.Array | None, rtol: jax.Array | None) -> jax.Array:
    """The singular value (..., 1) up to which values count as zero, by ``atol`` and ``rtol`` (...) as in torch."""
    default = max(x.shape[-2:]) * jnp.finfo(dtype).eps
    absolute = jnp.zeros((), dtype) if atol is None else atol
    if rtol is None:
        relative = jnp.where(absolute > 0, 0, default)
    else:
        relative = rtol
    absolute, relative = promote(absolute, relative)
    return jnp.maximum(absolute[..., None], relative[..., None] * largest)
