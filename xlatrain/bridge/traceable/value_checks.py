"""Checks of tensor values that libraries make on the host, left out while a step is captured.

A captured tensor has no values. The checks only raise; without them an invalid argument gives what its formula gives (a NaN). Or
they look for a shorter way to the same result.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributions
import torch.nn.functional as F
from torch.nn.modules import transformer

from xlatrain.bridge.patches import patched


def _no_check(*_: Any, **__: Any) -> None:
    """In place of ``torch._check_tensor_all_with``."""


def _is_said_to_be_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """In place of what compares the mask of ``nn.Transformer`` and its parts with the causal one, for a hint to attention.

    Attention uses the mask itself without that hint.
    """
    return is_causal is True


def _no_fast_path() -> bool:
    """Encoder layers in ``eval()`` would be one op, which no XLA program has: their formula is compiled instead."""
    return False


def _without_variance_check(gaussian_nll_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``F.gaussian_nll_loss`` for a tensor ``var``; formula, shape and reduction checks are the documented ones."""

    @functools.wraps(gaussian_nll_loss)
    def loss(
        input: torch.Tensor,
        target: torch.Tensor,
        var: torch.Tensor | float,
        full: bool = False,
        eps: float = 1e-6,
        reduction: str = "mean",
    ) -> torch.Tensor:
        if not isinstance(var, torch.Tensor):
            return gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"{reduction} is not valid")
        if var.shape != input.shape:
            if input.shape[:-1] == var.shape:
                var = var.unsqueeze(-1)
            elif input.ndim != var.ndim or sum(v for i, v in zip(input.shape, var.shape, strict=True) if i != v) != 1:
                raise ValueError("var is of incorrect size")
        var = var.clone()
        with torch.no_grad():
            var.clamp_(min=eps)
        value = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
        if full:
            value = value + 0.5 * math.log(2 * math.pi)
        return value if reduction == "none" else value.mean() if reduction == "mean" else value.sum()

    return loss


@contextlib.contextmanager
def without_value_checks() -> Iterator[None]:
    """Within the block: no ``torch._check_tensor_all``, no argument checks of ``torch.distributions`` (unless asked for by
    ``validate_args=True``), no check of ``F.gaussian_nll_loss``'s variance, no look at the values of ``nn.Transformer``'s
    masks, none of the ops that its layers are in ``eval()``."""
    patches = (
        (torch, "_check_tensor_all_with", _no_check),
        (torch.distributions.Distribution, "_validate_args", False),
        (transformer, "_detect_is_causal_mask", _is_said_to_be_causal),
        (torch.backends.mha, "get_fastpath_enabled", _no_fast_path),
        (F, "gaussian_nll_loss", _without_variance_check(F.gaussian_nll_loss)),
    )
    with patched(patches):
        yield
