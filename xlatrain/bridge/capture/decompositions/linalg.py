"""Determinants and linear systems in terms of one LU factorisation, made where torch's strides are still known.

For a real contiguous matrix torch may factorise the transpose (LAPACK counts by columns), and its gradient formulas rely on that.
XLA values have no strides, so the choice is made while PyTorch captures; which ops do so depends on torch's version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def linalg_decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The decompositions of ``_linalg_det``, ``_linalg_slogdet`` and ``_linalg_solve_ex``. To be called outside of capture."""
    _solve_factorises_transpose()
    return {
        aten._linalg_det.default: det,
        aten._linalg_slogdet.default: slogdet,
        aten._linalg_solve_ex.default: solve_ex,
    }


def _uses_transpose(a: torch.Tensor) -> bool:
    """Whether torch factorises the transpose of ``a`` (..., N, N): LAPACK stores columns."""
    return a.is_contiguous() and not a.is_complex()


def _lu(a: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LU factors, pivots and info of ``a`` (..., N, N), or of its transpose."""
    return aten.linalg_lu_factor_ex(a.mT if transposed else a)


@functools.cache
def _solve_factorises_transpose() -> bool:
    """Whether this torch's ``_linalg_solve_ex`` factorises the transpose of contiguous matrices, from an example."""
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    factors = aten._linalg_solve_ex(matrix, torch.ones(2, 1, dtype=torch.float64))[1]
    return factors[0, 0].item() == 2.0  # the pivot of the first column: 3 of the matrix, 2 of its transpose


def _parity(pivots: torch.Tensor) -> torch.Tensor:
    """The sign of the row exchanges, 1 or -1 (...), from pivots (..., N) that count from 1."""
    own = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return 1 - 2 * ((pivots != own).sum(-1) % 2)


def det(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The determinant (...) of ``a`` (..., N, N), LU factors and pivots, as ``aten._linalg_det`` returns them."""
    lu, pivots, _ = _lu(a, _uses_transpose(a))
    return lu.diagonal(dim1=-2, dim2=-1).prod(-1) * _parity(pivots).to(a.dtype), lu, pivots


def slogdet(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sign and logarithm (...) of the determinant of ``a`` (..., N, N), LU factors and pivots."""
    lu, pivots, _ = _lu(a, _uses_transpose(a))
    diagonal = lu.diagonal(dim1=-2, dim2=-1)
    sign = diagonal.sgn().prod(-1) * _parity(pivots).to(a.dtype)
    return sign, diagonal.abs().log().sum(-1), lu, pivots


def solve_ex(
    a: torch.Tensor, b: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The solution, LU factors, pivots and info of ``a`` (..., N, N) and ``b``; a compiled program cannot raise.

    ``b`` is a batch of vectors (..., N) where its shape is that of ``a`` without the last dim, else of matrices.
    """
    del check_errors
    transposed = _solve_factorises_transpose() and _uses_transpose(a)
    lu, pivots, info = _lu(a, transposed)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    x = aten.linalg_lu_solve(lu, pivots, b.unsqueeze(-1) if vector else b, left=left, adjoint=transposed)
    return (x.squeeze(-1) if vector else x), lu, pivots, info
