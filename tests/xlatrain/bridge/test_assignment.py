"""The assignment of least cost, against SciPy's, with its choice where several cost the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from tests.xlatrain.bridge._compare import through_bridge
from xlatrain.bridge.capture.traceable.assignment import INFEASIBLE, INVALID, assigned

Costs = Callable[[np.random.Generator, tuple[int, int]], Any]

COSTS: dict[str, Costs] = {
    "all different": lambda rng, shape: rng.normal(size=shape),
    "many equal": lambda rng, shape: rng.integers(0, 3, shape),
    "tenths": lambda rng, shape: rng.integers(-4, 4, shape) * 0.1,
    "all equal": lambda rng, shape: np.zeros(shape),
    "some endless": lambda rng, shape: np.where(
        (rng.random(shape) < 0.3) & (np.add.outer(*map(np.arange, shape)) % 3 > 0), np.inf, rng.random(shape)
    ),
    "some the greatest": lambda rng, shape: np.where(rng.random(shape) < 0.3, np.finfo(np.float32).max, rng.random(shape)),
}


def assigned_here(cost: torch.Tensor, maximize: bool) -> tuple[np.ndarray, ...]:
    return through_bridge(lambda x: assigned(x, maximize=maximize), cost)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (3, 7), (9, 2), (17, 12)])
def test_same_indices_as_scipy(costs: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    for maximize in (False, True):
        cost = torch.tensor(COSTS[costs](rng, shape), dtype=torch.float32)
        cost = -cost if maximize and costs == "some endless" else cost
        try:
            expected = linear_sum_assignment(cost, maximize)
        except ValueError:
            assert assigned_here(cost, maximize)[2] == INFEASIBLE
            continue
        *found, outcome = assigned_here(cost, maximize)
        assert outcome == 0
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_no_costs(shape: tuple[int, int]) -> None:
    *found, outcome = assigned_here(torch.zeros(shape), False)
    assert [one.shape for one in found] == [(0,), (0,)]
    assert outcome == 0


def test_costs_that_scipy_refuses() -> None:
    cost = torch.rand(4, 3)
    cost[1] = torch.inf
    cost[:, 2] = torch.inf
    assert assigned_here(cost, False)[2] == INFEASIBLE
    assert assigned_here(cost, True)[2] == INVALID
    assert assigned_here(torch.full((2, 2), torch.nan), False)[2] == INVALID


def test_whole_numbers_and_both_precisions() -> None:
    rng = np.random.default_rng(7)
    for dtype in (torch.int64, torch.float16, torch.bool):
        cost = torch.tensor(rng.integers(0, 9, (5, 6))).to(dtype)
        np.testing.assert_array_equal(assigned_here(cost, False)[1], linear_sum_assignment(cost)[1])
    with jax.enable_x64(True):
        wide = torch.tensor(1 + rng.random((6, 6)) * 1e-12)
        np.testing.assert_array_equal(assigned_here(wide, False)[1], linear_sum_assignment(wide)[1])
