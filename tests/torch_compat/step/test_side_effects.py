"""Python side effects of a step: found, taken back, repeated."""

from __future__ import annotations

import gc
import random
import sys
import time
import types
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_compat.step.effects.recorder import EffectRecorder, changing_nothing, holds_traced
from torch_compat.step.host.draws import DrawRecorder
from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.host.scalar_plan import SLOTS
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from torch_compat.step.host.slots import ValueSlot
from xlatrain.bridge.errors import CaptureError


class Settings:
    """A plain object of the user's."""

    def __init__(self) -> None:
        self.count = 0


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.seen = []  # pyright: ignore[reportAttributeAccessIssue]
        self.numbers = [1]
        self.table: dict[str, Any] = {"a": {"b": 1}}
        self.queue = deque([1, 2], maxlen=3)
        self.names = {"x"}
        self.flag = False
        self.settings = Settings()

    def change(self) -> None:
        self.inner.seen.append(3)  # pyright: ignore[reportAttributeAccessIssue]
        self.numbers.append(2)
        self.table["a"]["b"] = 2
        self.table["new"] = [5]
        self.queue.append(3)
        self.names.add("y")
        self.flag = True
        self.settings.count += 1

    def contents(self) -> Any:
        inner = list(self.inner.seen)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return [inner, self.numbers, self.table, list(self.queue), sorted(self.names), self.flag, self.settings.count]


def test_changes_are_taken_back_and_repeated() -> None:
    holder = Holder()
    expected = Holder()
    recorder = EffectRecorder({"self": holder})
    with recorder.recording() as recording:
        holder.change()
    effects = recording.effects(lambda tree: tree)
    assert repr(holder.contents()) == repr(expected.contents())
    expected.change()
    effects.replay(recorder.roots, lambda tree: tree)
    assert repr(holder.contents()) == repr(expected.contents())


def test_attributes_are_named_by_their_owner() -> None:
    holder = Holder()
    with EffectRecorder({"self": holder}).recording() as recording:
        holder.change()
    effects = recording.effects(lambda tree: tree)
    assert effects.attributes(rebound=True) == {("", "flag"), ("", "settings")}
    assert ("inner", "seen") in effects.attributes()


def test_a_step_without_side_effects_has_none() -> None:
    with EffectRecorder({"self": Holder()}).recording() as recording:
        pass
    assert not recording.effects(lambda tree: tree)


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (random.Random(1), lambda generator: generator.random()),
        (np.random.default_rng(1), lambda generator: generator.random()),
        (np.random.RandomState(1), lambda generator: generator.rand()),
        (torch.Generator().manual_seed(1), lambda generator: torch.rand(1, generator=generator).item()),
    ],
)
def test_a_draw_from_a_kept_generator_is_named_put_back_and_can_be_redone(generator: Any, draw: Any) -> None:
    holder = Holder()
    holder.table["generator"] = generator
    with EffectRecorder({"self": holder}).recording() as recording:
        drawn = draw(generator)
    effects = recording.effects(lambda tree: tree)
    assert "random generator self.table['generator']" in effects.refusal
    assert draw(generator) == drawn
    after = draw(generator)
    for redo in effects.redo:
        redo()
    assert draw(generator) == after


LIBRARY = """
import torch
class Likelihood:
    def __init__(self):
        self.quantiles, self.first, self.calls = None, True, []
class Forecaster(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.likelihood = Likelihood()
"""


@pytest.fixture
def forecaster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of an installed library, with an object of the library's."""
    library = types.ModuleType("some_library")
    library.__file__ = torch.__file__
    exec(LIBRARY, vars(library))
    monkeypatch.setitem(sys.modules, "some_library", library)
    return library.Forecaster()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_librarys_object_fills_its_caches_after_the_step(forecaster: Any) -> None:
    """Its reads are not followed: the step holds only where the attributes are what they were."""
    recorder = EffectRecorder({"self": forecaster})
    with FakeTensorMode() as fakes, recorder.recording() as recording:
        forecaster.likelihood.quantiles = fakes.from_tensor(torch.zeros(2))
        forecaster.likelihood.first = False
    assert forecaster.likelihood.quantiles is None
    assert forecaster.likelihood.first
    effects = recording.effects(lambda tree: tree)
    assert effects.fit(recorder.roots)
    real = torch.ones(2)
    effects.replay(recorder.roots, lambda value: real if isinstance(value, torch.Tensor) else value)
    assert type(forecaster.likelihood.quantiles) is torch.Tensor
    assert torch.equal(forecaster.likelihood.quantiles, real)
    assert not forecaster.likelihood.first
    assert not effects.fit(recorder.roots)


def test_a_librarys_object_that_changes_otherwise_is_refused(forecaster: Any) -> None:
    with EffectRecorder({"self": forecaster}).recording() as recording:
        forecaster.likelihood.calls.append(1)
    assert forecaster.likelihood.calls == []
    with pytest.raises(CaptureError, match=r"changes self\.likelihood\.calls, in an object of the library's"):
        recording.effects(lambda tree: tree)


@pytest.mark.parametrize("value", [torch.device("cpu"), torch.float32, torch.Size([2]), (torch.int64, "a"), 3, "text", None])
def test_a_value_that_a_step_assigns_each_time_is_an_effect_each_time(value: Any) -> None:
    holder = Holder()
    found = []
    for _ in range(2):
        with EffectRecorder({"self": holder}).recording() as recording:
            holder.flag = value
            recording.note_written(holder, "flag")
        effects = recording.effects(lambda tree: tree)
        found.append(effects.fingerprint(frozenset()))
        effects.replay({"self": holder}, lambda tree: tree)
    assert found[0] == found[1] != ""


def test_a_part_of_a_step_that_may_change_nothing() -> None:
    holder = Holder()
    with EffectRecorder({"self": holder}).recording():
        holder.change()
        with changing_nothing(CaptureError):
            assert holder.flag
        for change in (holder.change, lambda: holder.numbers.clear(), lambda: setattr(holder.settings, "count", 9)):
            with pytest.raises(CaptureError), changing_nothing(CaptureError):
                change()
    assert repr(holder.contents()) == repr(Holder().contents())


def test_a_hook_that_a_step_leaves_on_a_module_is_taken_away_and_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    kept = module[0].register_forward_hook(print)
    with EffectRecorder({"self": module}).recording() as recording:
        module[0].register_forward_hook(print)
        kept.remove()
    assert list(module[0]._forward_hooks) == [kept.id]
    with pytest.raises(CaptureError, match="registers a hook on self"):
        recording.effects(lambda tree: tree)
    with EffectRecorder({"self": module}).recording() as recording:
        module[0].register_forward_hook(print).remove()
    assert not recording.effects(lambda tree: tree)


def test_a_clock_is_read_once_in_a_step() -> None:
    before, numbers = time.time(), HostNumbers({})
    tracer = ScalarTracer(HostValues(numbers), torch.zeros(SLOTS), torch.zeros(SLOTS))
    with DrawRecorder(tracer, HostValues(numbers)).recording():
        now = time.time()
        assert type(now) is HostScalar
        with pytest.raises(CaptureError, match="reads a clock a second time"):
            time.perf_counter()
    later = HostNumbers({})
    tracer.plan.draws.make(HostValues(later))
    expression, _ = now.deferred()
    assert before <= numbers["time.time()"] <= expression(HostValues(later)) <= time.time()


@pytest.mark.parametrize("wrap", [lambda one: types.SimpleNamespace(value=one), lambda one: Kept([one])])
def test_a_value_of_the_step_in_an_object_that_it_stores_is_refused(wrap: Any) -> None:
    tracer = ScalarTracer(HostValues(HostNumbers({"batch_idx": 3})), torch.zeros(SLOTS), torch.zeros(SLOTS))
    holder = Holder()
    with EffectRecorder({"self": holder}).recording() as recording:
        holder.flag = wrap(tracer.counter("batch_idx"))
    with pytest.raises(CaptureError, match="keeps values of its own batch"):
        recording.effects(lambda tree: tree)
    assert not holds_traced(wrap(4))


def test_an_object_that_a_step_makes_with_its_tensors_is_made_anew() -> None:
    holder, other = Holder(), Kept("was there")
    with FakeTensorMode(), EffectRecorder({"self": holder}).recording() as recording:
        inner = torch.distributions.Normal(torch.zeros(3), torch.ones(3), validate_args=False)
        holder.flag = Kept([inner, {"other": other, "none": None}])  # pyright: ignore[reportAttributeAccessIssue]
        holder.table["object"] = recursive = types.SimpleNamespace(value=torch.zeros(2))
    effects = recording.effects(lambda tree: pytree.tree_map_only(torch.Tensor, lambda one: ValueSlot("values", 0), tree))
    with pytest.raises(CaptureError, match="keeps values of its own batch"), FakeTensorMode():
        with EffectRecorder({"self": holder}).recording() as recording:
            recursive.value, recursive.again = torch.zeros(2), recursive
            holder.table["object"] = recursive
        recording.effects(lambda tree: tree)
    value = torch.tensor([1.0, 2.0])
    for _ in range(2):
        effects.replay({"self": holder}, lambda tree: pytree.tree_map_only(ValueSlot, lambda slot: value, tree))
        made: Any = holder.flag
        assert type(made) is Kept and type(made.value[0]) is torch.distributions.Normal
        assert made.value[0].loc is value and made.value[0]._validate_args is False
        assert made.value[1]["other"] is other and made.value[1]["none"] is None
        assert type(holder.table["object"]) is types.SimpleNamespace and holder.table["object"].value is value


class Kept:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def test_a_recording_that_is_done_holds_nothing_until_garbage_is_collected() -> None:
    """What hooks drop is gone for weak references that steps ask."""
    holder = Holder()
    with EffectRecorder({"self": holder}).recording() as recording:
        pass
    recording.with_objects({"loss": torch.zeros(()), "all": [1, 2]})
    gone = weakref.ref(recording)
    gc.disable()
    try:
        del recording
        assert gone() is None
    finally:
        gc.enable()
