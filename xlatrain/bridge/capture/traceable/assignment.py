"""SciPy's ``linear_sum_assignment`` as an op: the matching of predictions with targets (DETR and its kin)."""

from __future__ import annotations

import torch

from xlatrain.bridge.fake_kernels import fake_kernel

INVALID, INFEASIBLE = 1, 2
"""Outcomes in which SciPy raises: costs that are NaN or -inf, and no assignment without a cost of inf."""

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("linear_sum_assignment(Tensor cost, bool maximize) -> (Tensor, Tensor, Tensor)")


@fake_kernel(_LIBRARY, "linear_sum_assignment")
def _fake(cost: torch.Tensor, maximize: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of the indices of rows, of columns, and of the outcome."""
    count = min(cost.shape)
    index = cost.new_empty((count,), dtype=torch.int64)
    return index, torch.empty_like(index), cost.new_empty((), dtype=torch.int32)


def assigned(cost: torch.Tensor, *, maximize: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices of the rows, ascending, and of the columns of the assignment that SciPy finds, and the outcome: 0, or why none."""
    return torch.ops.xlatrain.linear_sum_assignment(cost, maximize)
