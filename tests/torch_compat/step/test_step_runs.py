"""Runs of a step as values, and the sessions that make them: without a Trainer, a mesh or a program."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.wrapped import Wrapped
from torch_compat.run.batches import flatten_batch
from torch_compat.step.capture.cached_program import CachedProgram
from torch_compat.step.capture.session import CaptureSession, ImpureStepError
from torch_compat.step.capture.step_capture import StepInputs, StepSpec, TraceContext, Way, run_step
from torch_compat.step.capture.step_run import StepRun, graph_of
from torch_compat.step.capture.user_steps import evaluation_body
from torch_compat.step.effects.recorder import EffectRecorder, followed
from torch_compat.step.guards.step_guards import StepGuards
from torch_compat.step.host.assumptions import Assumptions
from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.optimizers.traced import OptimizerTrace
from xlatrain.bridge.capture.recorded.tape import NotRecordable
from xlatrain.bridge.errors import CaptureError

NAME = "validation_step"
Function = Callable[["Net", Tensor, Any], Any]


class Net(torch.nn.Module):
    """A module whose step is a function of it, a batch and the batch's index."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.number: Any = 1
        self.seen: list[Any] = []
        self.function = function

    def validation_step(self, batch: Tensor, batch_idx: Any) -> Any:
        return self.function(self, batch, batch_idx)


class Steps:
    """The step of a module, and a session of its runs.

    Attributes:
        count: how often the user's Python has run.
    """

    def __init__(self, function: Function) -> None:
        self.module = Net(function)
        self.recorder = EffectRecorder({"self": self.module})
        changed = self.recorder.roots
        self.guards = StepGuards(self.module, {}, lambda: None, lambda: followed(changed))
        self.session = CaptureSession(self.module, self.guards, changed)
        self.count = 0
        nothing = contextlib.nullcontext
        context = TraceContext(lambda _: nothing(), lambda *_: nothing(), nothing, lambda *_: nothing(OptimizerTrace()))
        self.spec = StepSpec(self.module, self.recorder, context, self._body, self._inputs, grad=False)

    def _body(self, *args: Any) -> Any:
        self.count += 1
        return evaluation_body(*args)

    def _inputs(self, host_values: HostValues) -> StepInputs:
        leaves, spec = flatten_batch(torch.zeros(4, 3))
        params, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())

        def call(batch: Any, tracer: Any) -> Any:
            return self.module.validation_step(batch, tracer.counter("batch_idx"))

        def reading(tracer: Any, host_values: HostValues) -> Any:
            return self.guards.reading(tracer, host_values)

        return StepInputs(params, buffers, leaves, spec, call, host_values, reading)

    def run(self, batch_idx: int = 0, way: Way = Way.RECORDED) -> StepRun:
        return run_step(self.spec, self._inputs(values(batch_idx)), way)

    def captured(self) -> CachedProgram:
        step = self.session.capture(NAME, self.spec, values())
        self.guards.skip_own(NAME, step.effects, self.recorder.roots)
        return CachedProgram(step, lambda *_: None, runs=1)


def values(batch_idx: int = 0) -> HostValues:
    numbers: dict[str, Any] = {"batch_idx": batch_idx}
    return HostValues(HostNumbers(numbers), assumptions=Assumptions())


def plain(net: Net, batch: Tensor, batch_idx: Any) -> Any:
    return net.layer(batch).sum() * net.number


def with_dead_ops(net: Net, batch: Tensor, batch_idx: Any) -> Any:
    if net.number == 2:
        batch.exp()
    return batch.sum()


def stored(net: Net, batch: Tensor, batch_idx: Any) -> Any:
    net.kept = net.number  # pyright: ignore[reportArgumentType]
    return batch.sum()


def branching(net: Net, batch: Tensor, batch_idx: Any) -> Any:
    assert (batch_idx < 5) in (True, False)  # the same with either answer
    return batch.sum()


def through_a_subclass(net: Net, batch: Tensor, batch_idx: Any) -> Any:
    return (Wrapped(batch) * 2).sum()


# -- runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [plain, with_dead_ops, stored, branching])
def test_two_runs_of_a_step_are_the_same(function: Function) -> None:
    steps = Steps(function)
    first, second = steps.run(), steps.run(3)
    assert second.same_as(first) is None
    assert (first.ops, first.text, first.reads) == (second.ops, second.text, second.reads)


def test_other_ops_may_come_to_the_same_graph() -> None:
    steps = Steps(with_dead_ops)
    first = steps.run()
    steps.module.number = 2
    second = steps.run()
    assert first.ops != second.ops
    assert second.same_as(first) is None


@pytest.mark.parametrize(
    ("function", "before", "now", "in_graph"),
    [(plain, ", 1)", ", 2)", True), (stored, "self.kept = 1", "self.kept = 2", False)],
    ids=["in the graph", "on the host"],
)
def test_a_difference_names_the_lines(function: Function, before: str, now: str, in_graph: bool) -> None:
    steps = Steps(function)
    first = steps.run()
    steps.module.number = 2
    found = steps.run().same_as(first)
    assert found is not None and found.in_graph is in_graph
    assert before in found.before and now in found.now


def test_other_answers_about_counters_are_a_difference() -> None:
    steps = Steps(branching)
    found = steps.run(7).same_as(steps.run(0))
    assert found is not None and not found.in_graph
    assert (found.before, found.now) == ("batch_idx < 5 is True", "batch_idx < 5 is False")


def test_a_graph_is_made_of_a_recorded_run_without_another() -> None:
    steps = Steps(plain)
    recorded, traced = steps.run(), steps.run(way=Way.TRACED)
    assert graph_of(recorded).code == graph_of(traced).code
    assert graph_of(recorded) is graph_of(recorded)
    assert steps.count == 2
    with pytest.raises(NotRecordable):
        graph_of(steps.run(way=Way.OP_BY_OP))


def test_a_run_leaves_nothing_behind() -> None:
    def changing(net: Net, batch: Tensor, batch_idx: Any) -> Any:
        net.number += 1
        net.seen.append(batch.sum())
        net.made = [1]  # pyright: ignore[reportArgumentType]
        return net.number

    steps = Steps(changing)
    before = dict(vars(steps.module))
    run = steps.run()
    assert vars(steps.module) == before and steps.module.seen == []
    assert run.text.count("self.") == 3


# -- sessions -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_recorded_is_traced_and_remembered() -> None:
    steps = Steps(through_a_subclass)
    variant = steps.captured()
    assert steps.count == 2  # recorded in vain, then traced
    assert steps.session.difference(NAME, variant, steps.spec, values(1)) is None
    assert steps.count == 3


def test_a_guess_that_leads_to_an_error_is_made_otherwise() -> None:
    def asking(net: Net, batch: Tensor, batch_idx: Any) -> Any:
        if not (net.layer(batch).sum() > 0):
            raise ValueError("a sum that is too small")
        return batch.sum()

    steps = Steps(asking)
    variant = steps.captured()
    assert variant.step.scalars.outcomes == [1]
    count = steps.count
    assert steps.session.does_the_same(NAME, variant, steps.spec, values(1))
    assert steps.count == count + 1  # recorded: that the step raised does not mean that it cannot be


def test_the_first_reason_is_told() -> None:
    def refused(net: Net, batch: Tensor, batch_idx: Any) -> Any:
        if not hasattr(net.number, "deferred"):
            raise CaptureError("the number is a constant")
        raise CaptureError("the number is an input")

    steps = Steps(refused)
    with steps.guards.following():
        with pytest.raises(CaptureError, match="a constant"):
            steps.captured()
        steps.module.number = 2
        steps.guards.promote(NAME)
        host_values = values()
        steps.guards.fill(NAME, host_values.numbers)
        count = steps.count
        with pytest.raises(CaptureError, match="an input"):
            steps.session.capture(NAME, steps.spec, host_values)
    assert steps.count >= count + 2  # it was tried with a constant, too


def test_of_a_step_that_raises_nothing_is_left() -> None:
    def raising(net: Net, batch: Tensor, batch_idx: Any) -> Any:
        net.number = 5
        raise ValueError("by the user")

    steps = Steps(raising)
    with pytest.raises(ValueError, match="by the user"):
        steps.captured()
    assert steps.module.number == 1


def test_an_audit_of_what_changes_names_it() -> None:
    steps = Steps(plain)
    variant = steps.captured()
    assert steps.session.audit(NAME, variant, steps.spec, values(1))
    steps.module.number = 2
    with pytest.raises(ImpureStepError, match=r"at first `.*, 1\).*`, now `.*, 2\).*`") as raised:
        steps.session.audit(NAME, variant, steps.spec, values(2))
    assert raised.value.recoverable
    assert not steps.session.does_the_same(NAME, variant, steps.spec, values(2))


def test_a_list_that_the_first_run_makes_is_no_impurity() -> None:
    def making(net: Net, batch: Tensor, batch_idx: Any) -> Any:
        if not hasattr(net, "losses"):
            net.losses = []  # pyright: ignore[reportArgumentType]
        net.losses.append(batch.sum())  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        return batch.sum()

    steps = Steps(making)
    variant = steps.captured()
    assert steps.session.audit(NAME, variant, steps.spec, values(1))
    steps.module.losses = [torch.zeros(())]  # pyright: ignore[reportArgumentType]
    assert not steps.session.audit(NAME, variant, steps.spec, values(2))


def test_what_a_step_assigns_each_time_is_no_difference() -> None:
    def assigning(net: Net, batch: Tensor, batch_idx: Any) -> Any:
        net.seen_shape = str(batch.shape)  # pyright: ignore[reportArgumentType]
        return batch.sum()

    steps = Steps(assigning)
    variant = steps.captured()
    steps.module.seen_shape = str(torch.zeros(4, 3).shape)  # pyright: ignore[reportArgumentType]
    assert steps.session.audit(NAME, variant, steps.spec, values(1))


def test_draws_that_cannot_be_repeated_are_refused_and_taken_back() -> None:
    def drawing(net: Net, batch: Tensor, batch_idx: Any) -> Any:
        return batch.sum() * random.Random.random(random._inst)  # pyright: ignore[reportAttributeAccessIssue]

    before = random.getstate()
    with pytest.raises(CaptureError, match="draw"):
        Steps(drawing).captured()
    assert random.getstate() == before
