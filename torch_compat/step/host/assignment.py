"""SciPy's ``linear_sum_assignment`` of costs of the step (a matching loss): in the program, where its indices are used."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.host_future import HostFuture
from xlatrain.bridge.capture.traceable.assignment import INFEASIBLE, INVALID, assigned

_NAME = "linear_sum_assignment"
_RAISED = {INVALID: "matrix contains invalid numeric entries", INFEASIBLE: "cost matrix is infeasible"}


def is_assignment(function: Any) -> bool:
    """Whether it is SciPy's function, which nobody has to have imported."""
    return getattr(function, "__name__", None) == _NAME and function is getattr(sys.modules.get("scipy.optimize"), _NAME, None)


def assigning(function: Callable[..., Any]) -> Callable[..., Any]:
    """SciPy's function: of costs of the step the indices are arrays that the program computes."""

    @functools.wraps(function)
    def assign(cost_matrix: Any, maximize: Any = False) -> Any:
        array: Any = cost_matrix.numpy() if is_traced(cost_matrix) and cost_matrix.dtype != torch.bfloat16 else cost_matrix
        cost = array.read_of() if type(array) is HostFuture else None
        if cost is None or cost.ndim != 2 or cost.is_complex() or type(maximize) is not bool:
            return function(cost_matrix, maximize)
        if array is not cost_matrix:
            array.drop_unused()
        rows, columns, outcome = assigned(cost, maximize=maximize)
        if (number := array.assumed(outcome)) is None:
            return function(cost_matrix, maximize)
        if number:
            raise ValueError(_RAISED[number])
        return rows.numpy(), columns.numpy()

    return assign
