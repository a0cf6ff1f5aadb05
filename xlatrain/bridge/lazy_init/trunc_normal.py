"""``torch.nn.init.trunc_normal_`` in a lazy-init block: how often torch draws depends on what it has drawn."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xlatrain.bridge.patches import patched

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define(
    "trunc_normal_(Tensor(a!) tensor, float mean, float std, float a, float b, *, Generator? generator=None) -> Tensor(a!)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.impl("trunc_normal_", torch.nn.init._no_grad_trunc_normal_, "CPU")
TRUNC_NORMAL: Any = torch.ops.xlatrain.trunc_normal_.default
"""Torch's own function as one op of the tape."""


@contextlib.contextmanager
def recorded_trunc_normal(is_torchs: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Within the block ``torch.nn.init.trunc_normal_`` looks at no values: it is an op, or draws once.

    Args:
        is_torchs: whether a tensor gets torch's own numbers.
    """

    def trunc_normal(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if generator is None and not is_torchs(tensor):
            return _by_inverse(tensor, mean, std, a, b)
        with torch.no_grad():
            return TRUNC_NORMAL(tensor, mean, std, a, b, generator=generator)

    with patched([(torch.nn.init, "_no_grad_trunc_normal_", trunc_normal)]):
        yield


def _by_inverse(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> torch.Tensor:
    """A normal distribution restricted to [a, b], by its inverse cumulative distribution."""

    def cumulative(x: float) -> float:
        return math.erf((x - mean) / (std * math.sqrt(2.0)))

    with torch.no_grad():
        tensor.uniform_(cumulative(a), cumulative(b))
        return tensor.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)
