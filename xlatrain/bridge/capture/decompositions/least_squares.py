"""``torch.linalg.lstsq`` while PyTorch captures, which has no meta function for it: through the singular value decomposition."""

from __future__ import annotations

import torch

aten = torch.ops.aten


def least_squares_decompositions() -> dict:
    """The decomposition of ``linalg_lstsq``."""
    return {aten.linalg_lstsq.default: lstsq}


def lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The solution of least norm, residuals, rank and singular values, of the shapes that torch gives for a matrix of full rank.

    Residuals of a matrix of lower rank are NaN: torch leaves them out, which depends on the data.
    """
    driver = driver or "gelsy"
    rows, cols = a.shape[-2:]
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and a.shape[:-1] == b.shape)
    columns = b.unsqueeze(-1) if vector else b
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    limit = max(rows, cols) * torch.finfo(a.dtype).eps if rcond is None else rcond
    keep = s > limit * s[..., :1]
    inverse = torch.where(keep, torch.where(keep, s, 1).reciprocal(), 0).to(a.dtype)
    x = vh.mH @ (inverse.unsqueeze(-1) * (u.mH @ columns))
    rank = keep.sum(-1)
    empty = s.new_empty(0)
    residuals = empty
    if rows > cols and driver != "gelsy":
        misses = (a @ x - columns).abs().square().sum(-2)
        residuals = torch.where((rank == cols).unsqueeze(-1), misses, float("nan"))
        residuals = residuals.squeeze(-1) if vector else residuals
    ranks = rank if driver != "gels" else rank.new_empty(0)
    values = s if driver in ("gelsd", "gelss") else empty
    return (x.squeeze(-1) if vector else x), residuals, ranks, values
