"""``torch.nn.init`` in a lazy-init block: ``trunc_normal_`` without a look at its values, and initializers that do nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xlatrain.bridge.patches import patched


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
    with patched([(torch.nn.init, "_no_grad_trunc_normal_", _trunc_normal)]):
        yield


class SkippedInitializers(TorchFunctionMode):
    """A mode in which the functions of ``torch.nn.init`` do nothing: for a module whose values are loaded next."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)
