"""Norms of gradients (``lightning.pytorch.utilities.grads``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, float]:
    """The norm of each parameter's gradient, and of all gradients together.

    Args:
        module: whose parameters; those without gradient are left out.
        norm_type: p of the p-norm, ``"inf"`` for the largest absolute value.
        group_separator: between ``grad_{p}_norm`` and the parameter's name.

    Returns:
        ``{"grad_{p}_norm/{name}": norm, …, "grad_{p}_norm_total": norm}`` with 0-d tensors; empty without gradients.

    Raises:
        ValueError: a norm type that is not positive.
    """
    norm_type = float(norm_type)
    if norm_type <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {norm_type}")
    norms: dict[str, Tensor] = {
        f"grad_{norm_type}_norm{group_separator}{name}": parameter.grad.data.norm(norm_type)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{norm_type}_norm_total"] = torch.stack(list(norms.values())).norm(norm_type)
    return norms  # pyright: ignore[reportReturnType]
