"""Marks of values, places of the host's state, and what an observation of one function notes of them."""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import functools
import gc
import io
import logging
import math
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_compat.step.effects.effects import ObjectPath, outline
from torch_compat.step.effects.recorder import EffectRecorder
from torch_compat.step.guards import noted_places
from torch_compat.step.guards.compared_places import Locations
from torch_compat.step.guards.locations import Attribute, Contents, Entry, File, Item, Kind, Lookup, Member
from torch_compat.step.guards.observation import Observation
from torch_compat.step.values.marks import contents, holds_the_same, look, mark, same
from torch_compat.utilities.parsing import AttributeDict
from xlatrain.bridge.errors import CaptureError

NAN, ONE = float("nan"), np.float32(1)


class Holder:
    """An object with an attribute."""

    shared = 1

    def __init__(self, value: Any = 1) -> None:
        self.value = value


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("value",)


# -- one definition of "same as before" ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now"),
    [(1, 1), (257 * 3, int("771")), ("ab" * 2, "abab"), (NAN, float("nan")), (1.5, 1.5), (None, None), (ONE, np.float32(1))],
)
def test_equal_plain_values_are_the_same(before: Any, now: Any) -> None:
    assert same(now, before)
    assert mark(now) == mark(before) and look(now) == look(before)
    assert holds_the_same([now], [before]) and holds_the_same({"key": now}, {"key": before})


@pytest.mark.parametrize(
    ("before", "now"),
    [(1, True), (1, 1.0), (0.0, -0.0), (0, None), ("1", 1), (b"a", "a"), (ONE, 1.0), (ONE, np.float64(1)), (2, 3)],
)
def test_values_that_python_can_tell_apart_are_not(before: Any, now: Any) -> None:
    assert not same(now, before) and not same(before, now)
    assert mark(now) != mark(before) and look(now) != look(before)
    assert not holds_the_same([now], [before])
    where = ObjectPath("self", (("attr", "value"),))
    assert outline(where, {"self": Holder([now])}) != outline(where, {"self": Holder([before])})


def test_objects_are_the_same_by_which_one_they_are() -> None:
    one, other = [1], [1]
    assert same(one, one) and not same(other, one)
    assert mark(one) == mark(one) != mark(other)
    assert look(one) == look(other)  # a branch without values could not tell
    assert look(torch.zeros(1)) == look(torch.nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held["list"].append(1),
        lambda held: held["dict"].update(b=2),
        lambda held: held["dict"].update(a=True),
        lambda held: held["dict"].update(a=held["dict"].pop("a")),  # in another order
        lambda held: held["set"].add(3),
        lambda held: held["queue"].rotate(),
        lambda held: held["array"].__setitem__(0, 2.0),
    ],
)
def test_contents_that_have_changed_are_seen(change: Callable[[dict[str, Any]], Any]) -> None:
    array = np.array([1.0, NAN])
    held = {"list": [0], "dict": {"a": 1, "z": 0}, "set": {1}, "queue": collections.deque([1, 2]), "array": array}
    before, marks = {name: copy.copy(one) for name, one in held.items()}, {name: contents(one) for name, one in held.items()}
    assert all(holds_the_same(one, before[name]) and contents(one) == marks[name] for name, one in held.items())
    change(held)
    [changed] = [name for name, one in held.items() if not holds_the_same(one, before[name])]
    assert contents(held[changed]) != marks[changed]


@pytest.mark.parametrize(("before", "now"), [(1, True), (0.0, -0.0), (1, 1.0)])
def test_a_step_that_assigns_another_number_that_is_equal_has_an_effect(before: Any, now: Any) -> None:
    holder = Holder(before)
    with EffectRecorder({"self": holder}).recording() as recording:
        holder.value = now
    [record] = recording.effects(lambda tree: tree).records
    assert type(holder.value) is type(before) and repr(record.value) == repr(now)


# -- places -------------------------------------------------------------------------------------------------------------


def test_places_that_look_otherwise_are_seen_each_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    holder, entries, numbers, log = Holder(), {"a": 1}, [1, 2], logging.getLogger("test places")
    cases: list[tuple[Any, Callable[[], Any]]] = [
        (Entry(entries, "a", "an entry"), lambda: entries.update(a=2)),
        (Entry(entries, "missing", "an entry"), lambda: entries.update(missing=1)),
        (Item(numbers, 1, "an item"), lambda: numbers.__setitem__(1, 5)),
        (Contents(numbers, "a list"), lambda: numbers.append(3)),
        (Attribute(holder, "value", "an attribute"), lambda: setattr(holder, "value", 2)),
        (Lookup(Holder, "shared", "of a class"), lambda: setattr(Holder, "shared", 2)),
        (Kind(holder, "a class"), lambda: setattr(holder, "__class__", type("Other", (Holder,), {}))),
        (Member(entries, "b", "a member"), lambda: entries.update(b=1)),
        (Contents(log, "a logger"), lambda: log.setLevel(37)),
        (File(str(file), "a file"), lambda: file.write_text("other")),
    ]
    for place, change in cases:
        places = Locations([place])
        assert not places.changed() and list(places.parts()) == [place.key]
        change()
        assert places.changed(), place.text
    Holder.shared = 1


def test_a_place_is_put_back() -> None:
    entries, numbers = {"a": 1}, [1, 2]
    for place, change in (
        (Entry(entries, "a", ""), lambda: entries.pop("a")),
        (Entry(entries, "b", ""), lambda: entries.update(b=1)),
        (Contents(numbers, ""), numbers.clear),
        (Lookup(Holder, "shared", ""), lambda: setattr(Holder, "shared", 5)),
    ):
        before, kept = place.now(), place.keep()
        change()
        assert place.now() != before
        place.restore(kept)
        assert place.now() == before
    assert (entries, numbers, Holder.shared) == ({"a": 1}, [1, 2], 1)


# -- observations -------------------------------------------------------------------------------------------------------

TABLE = {"rate": 0.5, "unused": 1}
CONFIG = Holder()
COUNTS: list[int] = []


def reads() -> float:
    made = Holder(3)  # the step's own: no read
    made.value += 1
    return TABLE["rate"] * CONFIG.value * made.value * math.pi


def writes() -> None:
    COUNTS.append(len(TABLE))
    CONFIG.value = 7


def observed(function: Any) -> tuple[set[str], list[str]]:
    observation = Observation([function], [])
    with observation.instrumented:
        function()
    found, changed = observation.settle(lambda: ())
    return {f"{type(one).__name__} {one.name}" for one in found}, [one.does for one in changed]


def test_what_was_read_is_noted_and_what_the_function_made_is_not() -> None:
    found, changed = observed(reads)
    assert {"Entry rate", "Entry value"} <= found and "Entry unused" not in found
    assert sum(one == "Entry value" for one in found) == 1 and changed == []


def test_what_was_written_is_named_and_put_back() -> None:
    _, changed = observed(writes)
    assert len(changed) == 2 and any("CONFIG" in text for text in changed)
    assert (COUNTS, CONFIG.value) == ([], 1)


@pytest.mark.parametrize("use", [next, list, lambda found: [one + 1 for one in found], lambda found: found.__next__()])
@pytest.mark.parametrize("holder", [Holder(), AttributeDict(value=1), Slotted()])
def test_nothing_is_taken_from_an_iterator_that_was_there_before(holder: Any, use: Any) -> None:
    holder.value = iter([1, 2, 3])

    def takes() -> Any:
        return use(holder.value)

    with pytest.raises(CaptureError, match=r"\.value, an iterator"):
        observed(takes)
    assert next(holder.value) == 1


def test_an_iterator_that_the_function_made_is_its_own() -> None:
    def takes() -> int:
        made = iter([CONFIG.value, 2])
        return next(made) + sum(one for one in made)

    assert "Entry value" in observed(takes)[0]


def test_a_random_generator_in_an_object_is_put_back_and_named() -> None:
    holder = Holder(random.Random(0))
    before = holder.value.getstate()

    def draws() -> float:
        return holder.value.random()

    assert any("value" in text for text in observed(draws)[1]) and holder.value.getstate() == before


def _writes_to_memory(held: Any) -> None:
    held.number.value += 1
    held.numbers[1] += 1
    held.array[0] = 5.0
    held.of_numpy[0] = 7.0
    held.view[0] = 5
    held.text.write("zz")
    held.slotted.value = 2
    type(held.kind).of_kinds += 1


class Kinds(type):
    of_kinds = 1


def test_what_is_written_to_memory_slots_and_classes_of_classes_is_put_back() -> None:
    slotted = Slotted()
    slotted.value = 1
    held = types.SimpleNamespace(
        number=ctypes.c_double(1.0),
        numbers=(ctypes.c_double * 2)(1.0, 2.0),
        array=array.array("d", [1.0]),
        of_numpy=np.ones(2),
        view=memoryview(bytearray(b"ab")),
        text=io.StringIO("ab"),
        slotted=slotted,
        kind=Kinds("Kind", (), {}),
    )

    def writes_to_memory() -> None:
        assert held.kind.of_kinds == 1
        _writes_to_memory(held)

    assert len(observed(writes_to_memory)[1]) >= 8
    assert (held.number.value, *held.numbers, *held.array, *held.of_numpy, *held.view) == (1, 1, 2, 1, 1, 1, *b"ab")
    assert (held.text.getvalue(), held.text.tell(), slotted.value, Kinds.of_kinds) == ("ab", 0, 1, 1)


def test_what_is_changed_by_code_without_notes_is_put_back_where_it_was_found() -> None:
    kind = Kinds("Kind", (), {})
    observation = Observation([], [])
    with observation.instrumented:
        observation.attribute(kind, "of_kinds")
        Kinds.of_kinds = 5
    assert len(observation.settle(lambda: ())[1]) == 1 and Kinds.of_kinds == 1


def test_another_entry_of_an_array_of_ctypes_is_seen() -> None:
    numbers = (ctypes.c_double * 2)(1.0, 2.0)
    before = contents(numbers)
    numbers[1] = 3.0
    assert contents(numbers) != before


def test_a_place_that_was_read_is_compared_from_then_on() -> None:
    observation = Observation([reads], [])
    with observation.instrumented:
        reads()
    places = Locations(observation.settle(lambda: ())[0])
    assert not places.changed()
    TABLE["unused"] = 2
    assert not places.changed()
    TABLE["rate"] = 0.25
    assert places.changed()
    TABLE.update(rate=0.5, unused=1)
    assert not places.changed()


def test_functions_around_are_followed() -> None:
    outer = 2.0

    def inner() -> float:
        return outer * CONFIG.value

    found, _ = observed(functools.partial(inner).func)
    assert "Entry value" in found


@pytest.mark.parametrize("followed", [True, False])
def test_garbage_is_collected_only_where_nobody_follows_what_has_changed(followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[float] = []
    collected: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(None))

    def grows() -> float:
        kept.append(1.0)
        return kept[-1]

    observation = Observation([grows], [])
    with observation.instrumented:
        grows()
    _, changed = observation.settle(lambda: {id(kept)} if followed else ())
    assert bool(collected) == bool(changed) == (not followed)


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
        ctx.kept = kept
        return x * 2


def test_what_calls_of_functions_keep_is_counted_where_they_alone_hold_it() -> None:
    inner, shown = {"a": 1}, {"b": 2}
    around = {"inner": shown}
    graph = Keeping.apply(torch.ones(2, requires_grad=True), {"inner": inner}), Keeping.apply(torch.ones(2), {})
    graph = (*graph, Keeping.apply(torch.ones(2, requires_grad=True), around))
    held = noted_places._held_by_calls()
    assert len(graph) == 3
    assert held[id(inner)] == 1 and held[id(shown)] == 0  # around is held here, too
