"""Initialisers of ``torch.nn.init`` that look at the values they drew, in a form that does not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch


def _trunc_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """A normal distribution restricted to [a, b], by its inverse cumulative distribution; torch draws until all fit."""

    def cumulative(x: float) -> float:
        return math.erf((x - mean) / (std * math.sqrt(2.0)))

    with torch.no_grad():
        tensor.uniform_(cumulative(a), cumulative(b), generator=generator)
        return tensor.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)


@contextlib.contextmanager
def compute_trunc_normal() -> Iterator[None]:
    """Within the block ``torch.nn.init.trunc_normal_`` draws once instead of until nothing is outside."""
    original = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = _trunc_normal
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original
