"""Host actions of a captured step before its program: schedulers, options, their order, and taking them back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_compat.step.host.host_values import HostNumbers, HostValues, Readers
from torch_compat.step.optimizers.forms import functional_form
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.host_actions import (
    HostExpression,
    HostPlan,
    Read,
    SetOption,
    StepOptimizer,
    StepScheduler,
)
from torch_compat.step.optimizers.host_part import HostPart
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from xlatrain.bridge.errors import CaptureError


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.4)


def functional(optimizer: torch.optim.Optimizer) -> FunctionalOptimizer:
    return functional_form(optimizer, {optimizer.param_groups[0]["params"][0]: "w"})


def halved(schedule: Any) -> StepScheduler:
    return StepScheduler(schedule, "schedule", (), {})


def test_each_optimizer_step_has_the_options_of_its_moment(optimizer: torch.optim.Optimizer) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    name = "optimizers[0].param_groups[0]['lr']"
    numbers = HostNumbers({"global_step": 3}, {name: lambda: optimizer.param_groups[0]["lr"]})
    tenth = HostExpression(lambda host_values: host_values.numbers["global_step"] / 10, "global_step / 10")
    rate = SetOption(lambda: optimizer.param_groups, name, 0, "lr", tenth)
    read = Read(name, f"{name} after 1", lambda: optimizer.param_groups[0]["lr"])
    plan = HostPlan([StepOptimizer(0), halved(schedule), read, StepOptimizer(0), rate, StepOptimizer(0)])
    first, second, third = plan.run(HostValues(numbers), (functional(optimizer),))
    assert [float(vector[0]) for vector in (first, second, third)] == pytest.approx([0.4, 0.2, 0.3])
    assert (numbers[name], numbers[f"{name} after 1"]) == (0.4, 0.2)  # a read before a change gives what was there before
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_options_are_put_on_the_mesh_when_they_change_and_what_a_step_did_is_undone(optimizer: torch.optim.Optimizer) -> None:
    placed: list[float] = []
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    host = HostPart(OptimizerSet([functional(optimizer)]), lambda vector: placed.append(float(vector[0])) or len(placed))
    only_steps = HostPlan([StepOptimizer(0)])
    assert [host.run(only_steps, HostValues(HostNumbers({})), undoable=True) for _ in range(3)] == [[1], [1], [1]]
    changes = HostPlan([StepOptimizer(0), halved(schedule), StepOptimizer(0)])
    assert host.run(changes, HostValues(HostNumbers({})), undoable=True) == [1, 2]
    assert placed == pytest.approx([0.4, 0.2])
    host.undo()
    assert optimizer.param_groups[0]["lr"] == 0.4
    host.run(changes, HostValues(HostNumbers({})), undoable=True)
    host.begin()
    host.undo()  # of a step that is over nothing is undone
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_what_a_plan_did_is_taken_back(optimizer: torch.optim.Optimizer) -> None:
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [2])
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
    before = (repr(optimizer.param_groups), schedule.state_dict())
    plan = HostPlan([halved(schedule), halved(schedule), halved(schedule)])
    optimizers = (functional(optimizer),)
    undo = plan.undo(optimizers)
    plan.run(HostValues(HostNumbers({})), optimizers)
    assert schedule.last_epoch == 3
    undo()
    assert (repr(optimizer.param_groups), schedule.state_dict()) == before


def test_a_number_that_nobody_knows_yet_selects_no_variant() -> None:
    with pytest.raises(CaptureError, match=r"depends on optimizers\[0\].lr, which it changed itself before"):
        HostNumbers({})["optimizers[0].lr after 2"]


def test_a_number_that_a_capture_finds_can_be_read_in_the_step_that_is_captured() -> None:
    readers: Readers = {}
    numbers = HostNumbers({}, readers)
    readers["rate"] = lambda: 0.5
    assert numbers["rate"] == 0.5
