"""``torch.cov`` and ``torch.corrcoef`` without the host check that their C++ implementation makes of its divisor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from xlatrain.bridge.patches import patched


def cov(
    input: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None, aweights: torch.Tensor | None = None
) -> torch.Tensor:
    """The covariance matrix of variables in rows, observations in columns, as documented for ``torch.cov``.

    A divisor that is not positive counts as 0, as in torch, which also warns. Negative weights are not looked for.
    """
    if input.ndim > 2:
        raise ValueError(f"cov(): expected input to have two or fewer dimensions but got {input.ndim}")
    x = input.reshape(1, -1) if input.ndim < 2 else input
    weights = _weights(x.shape[1], fweights, aweights)
    if weights is None:
        mean = x.sum(1, keepdim=True) / x.shape[1]
        divisor = torch.full([], max(x.shape[1] - correction, 0), dtype=mean.dtype, device=x.device)
        centred = x - mean
        product = centred @ centred.mT.conj()
    else:
        total = weights.sum()
        mean = (x * weights).sum(1, keepdim=True) / total
        own = weights if aweights is None or correction == 0 else weights * aweights
        share = (own.sum() / total) if aweights is not None and correction != 0 else 1
        divisor = torch.clamp(total - correction * share, min=0)
        centred = x - mean
        product = centred @ (centred * weights).mT.conj()
    return (product / divisor).squeeze()


def _weights(count: int, fweights: torch.Tensor | None, aweights: torch.Tensor | None) -> torch.Tensor | None:
    """The product of the weights that are given."""
    for name, weights in (("fweights", fweights), ("aweights", aweights)):
        if weights is not None and tuple(weights.shape) != (count,):
            raise ValueError(f"cov(): expected {name} of shape ({count},), a weight per observation, got {tuple(weights.shape)}")
    if fweights is not None and aweights is not None:
        return fweights * aweights
    return fweights if aweights is None else aweights


def corrcoef(input: torch.Tensor) -> torch.Tensor:
    """The matrix of Pearson's correlation coefficients, clipped to [-1, 1] as in torch."""
    matrix = cov(input)
    if matrix.ndim == 0:
        return matrix / matrix
    deviation = matrix.diagonal().real.sqrt() if matrix.is_complex() else matrix.diagonal().sqrt()
    scaled = matrix / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    if scaled.is_complex():
        return torch.complex(scaled.real.clip(-1, 1), scaled.imag.clip(-1, 1))
    return scaled.clip(-1, 1)


@contextlib.contextmanager
def traceable_covariance() -> Iterator[None]:
    """Within the block ``torch.cov``, ``torch.corrcoef`` and the methods are the functions of this module."""
    with patched((owner, function.__name__, function) for owner in (torch, torch.Tensor) for function in (cov, corrcoef)):
        yield
