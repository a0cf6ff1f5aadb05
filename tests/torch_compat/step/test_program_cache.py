"""The guards of a module's steps and the cache of its programs, without a Trainer, and with nothing for programs."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from torch_compat.run.report import ExecutorLog
from torch_compat.step.capture.cached_program import Built, CachedProgram
from torch_compat.step.capture.step_capture import StepInputs, StepSpec, TraceContext
from torch_compat.step.capture.user_steps import evaluation_body
from torch_compat.step.effects.recorder import EffectRecorder
from torch_compat.step.guards.entry_numbers import EntryNumbers
from torch_compat.step.guards.step_guards import StepGuards
from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.host.scalar_plan import SLOTS
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimizers.traced import OptimizerTrace
from torch_compat.step.placed_batch import BatchForms
from torch_compat.step.program_cache import CacheRun, ProgramCache, Wanted
from xlatrain.mesh.data import BatchPlacer
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import ShardingRules

NAME = "validation_step"
SCALE = {"outside": 1.0, "odd": 2.0}


class Net(torch.nn.Module):
    """A module whose step reads an attribute, a global and its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.mode = "sum"
        self.unread = 0

    def validation_step(self, batch: Tensor, batch_idx: Any) -> Any:
        found = self.layer(batch) * SCALE["outside"]
        if batch_idx % 2 == 1:
            found = found * SCALE["odd"]
        return found.sum() if self.mode == "sum" else found.mean()


class Cache:
    """A cache of the programs of a module, on one device.

    Attributes:
        built: how many programs were built.
    """

    def __init__(self) -> None:
        mesh = make_mesh({"data": 1}, jax.devices()[:1])
        self.module = Net()
        self.model = ModelState(self.module, mesh, ShardingRules(), seed=0)
        self.recorder = EffectRecorder({"self": self.module})
        self.log = ExecutorLog()
        self.programs = ProgramCache(CacheRun(self.model, {}, self.log, lambda _: None), self.recorder.roots)
        self.forms = BatchForms(BatchPlacer(mesh))
        self.built = 0

    def lookup(self, batch_idx: int = 0, rows: int = 4) -> CachedProgram:
        batch = self.forms.place(torch.zeros(rows, 3), True)
        nothing = contextlib.nullcontext
        context = TraceContext(self.model.live.traced_as, lambda *_: nothing(), nothing, lambda *_: nothing(OptimizerTrace()))

        def inputs(host_values: HostValues) -> StepInputs:
            leaves = batch.form.leaves()

            def call(batch: Any, tracer: Any) -> Any:
                return self.module.validation_step(batch, tracer.counter("batch_idx"))

            params, buffers = self.model.params, self.model.buffers
            return StepInputs(params, buffers, leaves, batch.spec, call, host_values, self.programs.reading)

        def build(step: Any, batch: Any) -> Built:
            self.built += 1
            return Built(lambda *_: self.built)

        spec = StepSpec(self.module, self.recorder, context, evaluation_body, inputs, grad=False)
        host_values = HostValues(HostNumbers({"batch_idx": batch_idx}))
        found = self.programs.program(Wanted(NAME, (), batch, host_values, spec, build))
        found.runs += 1
        return found


@pytest.fixture
def cache() -> Any:
    made = Cache()
    with made.programs.following():
        yield made


def test_one_program_serves_while_what_it_read_is_the_same(cache: Cache) -> None:
    first = cache.lookup(0)
    cache.module.unread = 5
    assert cache.lookup(2) is first and cache.built == 1
    assert cache.log.captures == cache.log.variants == 1


def test_each_change_of_what_it_read_is_another_program_and_the_way_back_is_none(cache: Cache) -> None:
    first, odd, long = cache.lookup(0), cache.lookup(1), cache.lookup(0, rows=6)
    cache.module.mode = "mean"
    mean = cache.lookup(0)
    cache.module.mode = "sum"
    back = cache.lookup(0)  # one more: now it is known that the host assigns it
    SCALE["outside"] = 2.0
    try:
        scaled = cache.lookup(0)
    finally:
        SCALE["outside"] = 1.0
    assert len({id(one) for one in (first, odd, long, mean, back, scaled)}) == cache.built == 6
    assert cache.lookup(0) is back
    cache.module.mode = "mean"
    assert cache.lookup(0) is mean and cache.built == 6


def test_what_was_changed_for_nothing_makes_no_program(cache: Cache) -> None:
    first = cache.lookup(0)
    SCALE["unread"] = 3.0
    try:
        assert cache.lookup(0) is first and cache.built == 1
    finally:
        del SCALE["unread"]


def test_a_change_is_asked_of_each_program() -> None:
    cache = Cache()
    with cache.programs.following():
        first, odd = cache.lookup(0), cache.lookup(1)
        SCALE["odd"] = 3.0
        try:
            assert cache.lookup(0) is first  # which does not read it
            changed = cache.lookup(1)
            assert changed is not odd
        finally:
            SCALE["odd"] = 2.0
        assert cache.lookup(1) is odd and cache.built == 3


def test_frozen_parameters_are_another_program(cache: Cache) -> None:
    first = cache.lookup(0)
    cache.module.layer.weight.requires_grad_(False)
    assert cache.lookup(0) is not first
    cache.module.layer.weight.requires_grad_(True)
    assert cache.lookup(0) is first


def test_a_step_that_is_no_more_has_no_programs(cache: Cache) -> None:
    first = cache.lookup(0)
    cache.programs.forget(NAME)
    assert cache.lookup(0) is not first


# -- guards -------------------------------------------------------------------------------------------------------------


def read_all(module: Net) -> tuple[str, float]:
    return module.mode, SCALE["outside"]


def test_keys_and_states_of_guards() -> None:
    module, restructured = Net(), []
    guards = StepGuards(module, {}, lambda: restructured.append(1))
    guards.add_function(NAME, read_all)

    def state() -> tuple[Any, Any]:
        guards.refresh(NAME)
        return guards.key(NAME), guards.state(NAME)

    with guards.following():
        with guards.capturing(NAME) as changed:
            assert read_all(module) == ("sum", 1.0)
        assert changed == []
        first = state()
        assert state() == first
        module.unread = 9
        assert state() == first
        module.mode = "mean"
        second = state()
        assert second[0] != first[0] and second[1] == first[1]
        assert "self.mode" in guards.facts(NAME)
        module.mode = "sum"
        assert state()[0] not in (second[0],)
        SCALE["outside"] = 2.0
        try:
            assert state()[1] != first[1]
        finally:
            SCALE["outside"] = 1.0
        assert state()[1] == first[1]
        module.layer = torch.nn.Linear(3, 2)
        guards.refresh(NAME)
    assert restructured


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count = 2


def test_numbers_in_entries_that_a_step_changes_become_inputs_and_constants_again() -> None:
    module: Any = Net()
    module.counts, module.few, module.counter = {"n": 1, "name": "x"}, [0, 1.5], Counter()
    recorder = EffectRecorder({"self": module})
    guards = StepGuards(module, {}, lambda: None, followed=recorder.roots)

    def change() -> None:
        module.counts["n"] += 1
        module.few[0] += 1
        module.counter.count += 1
        module.unread += 1

    with guards.following():
        with guards.capturing(NAME), recorder.recording() as recording:
            change()
        effects = recording.effects(lambda tree: tree)
        effects.replay(recorder.roots, lambda tree: tree)
        guards.carried(NAME, effects, [], ())
        before = guards.key(NAME)
        assert guards.learn_entries(NAME, effects) and not guards.learn_entries(NAME, effects)
        assert guards.key(NAME) != before
        numbers: dict[str, Any] = {}
        guards.fill(NAME, numbers)
        inputs = {"self.counts['n']": 2, "self.few[0]": 1, "self.few[1]": 1.5, "self.counter.count": 3}
        assert {name: value for name, value in numbers.items() if name != "self.unread"} == inputs
        host_values = HostValues(HostNumbers(numbers))
        tracer = ScalarTracer(host_values, torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS))
        with guards.capturing(NAME), recorder.recording() as recording, guards.reading(tracer, host_values):
            change()
            assert type(module.counts["n"]) is type(module.few[1]) is type(module.counter.count) is HostScalar
        assert (module.counts, module.few, module.counter.count) == ({"n": 2, "name": "x"}, [1, 1.5], 3)
        kinds = [type(leaf) for leaf in pytree.tree_leaves(recording.kept())]
        assert (kinds.count(HostScalar), len(kinds)) == (4, 5), kinds  # that of the module is an input otherwise
        with guards.capturing(NAME), recorder.recording() as recording, guards.reading(tracer, host_values):
            assert module.counts["n"] * 2 == 4
        assert recording.kept() == [] and module.counts["n"] == 2 and type(module.counts["n"]) is int
        same = guards.key(NAME)
        module.counts["n"] = 7
        assert guards.key(NAME) == same
        module.counts["n"] = 7.0
        assert guards.key(NAME) != same
        assert guards.demote(NAME) and not guards.learn_entries(NAME, effects)


def test_numbers_under_keys_of_one_text_are_told_apart() -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    module: Any = Net()
    one, other = Key(), Key()
    module.counts = {one: 1, other: 5}
    recorder = EffectRecorder({"self": module})
    entries = EntryNumbers(recorder.roots)
    with recorder.recording() as recording:
        module.counts[one] += 1
        module.counts[other] += 10
    effects = recording.effects(lambda tree: tree)
    assert entries.learn(NAME, effects, ())
    numbers: dict[str, Any] = {}
    entries.fill(NAME, numbers)
    assert sorted(numbers.values()) == sorted(module.counts.values())


def test_numbers_that_the_host_changes_become_inputs_and_constants_again() -> None:
    module = Net()
    guards = StepGuards(module, {}, lambda: None)
    with guards.following():
        with guards.capturing(NAME):
            assert module.unread == 0
        module.unread = 4
        guards.promote(NAME)
        numbers: dict[str, Any] = {}
        guards.fill(NAME, numbers)
        assert numbers == {"self.unread": 4}
        before = guards.key(NAME)
        module.unread = 5
        assert guards.key(NAME) == before
        assert guards.demote(NAME) and not guards.demote(NAME)
        assert guards.key(NAME) != before
