"""Changes of globals, tables, objects of installed packages and functions that a step has read, seen without compiling."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from torch_compat.step.guards.fingerprints import contents_of
from torch_compat.step.guards.place_guards import ChangedSurroundingsError, PlaceGuards
from torch_compat.step.values.user_objects import is_user_object
from xlatrain.bridge.errors import CaptureError

STEP = "a step"
TABLE = [0.0] * 300_000
ARRAY = np.zeros(4_800_000, np.float32)
RANKS = {1.0: 1, 2.0: 2}
SIZES = [2]
MANY = [[1.0] for _ in range(3000)]
DEEPEST: list[Any] = [1.0]
CHAIN = functools.reduce(lambda inner, _: [inner], range(12), DEEPEST)
OBJECTS = np.array([1.0, None], object)
GAPS = np.array([1.0, np.nan])  # equal to nothing, not even to itself
FOREIGN = PretrainedConfig()
FOREIGN.nested = {"deep": [1]}  # pyright: ignore[reportAttributeAccessIssue]
FACTOR = 1.0
FUNCTIONS = [functools.partial(lambda scale, x: x * FACTOR, 2.0)]
COUNT = 0
ROWS = iter(range(9))
GENERATOR = random.Random(0)
ORDERED: collections.OrderedDict[str, float] = collections.OrderedDict(a=1.0)


class Named:
    alpha_one = 1.0
    seen: list[float]

    def beta_one(self) -> float:
        return HIDDEN


class Above:
    kept_under = 1.0


class Below:
    kept_under = 2.0


class Moved(Above):
    pass


class Further(Named):
    def beta_one(self) -> float:
        return super().beta_one() + len(self)

    def __len__(self) -> int:
        return 2


HIDDEN = 1.0
HELPER = Further()


class Proxy:
    """Stands for nothing yet, and says so in its own way."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not bound")


def imports() -> Any:
    from torch.utils.data import default_collate

    return default_collate


def around(step: Callable[[], Any]) -> PlaceGuards:
    """The guards of a step that has run once."""
    found = PlaceGuards(torch.nn.Module(), {})
    found.add_function(STEP, step)
    with found.taken_back(STEP) as changed:
        step()
    found.refuse_changes(STEP, changed)
    return found


def states(guards: PlaceGuards, count: int) -> list[int]:
    return [guards.key(STEP) for _ in range(count)]


def given(value: Any) -> Callable[[], Any]:
    return lambda: len(repr(value))


CASES: dict[str, tuple[Callable[[], Any], Any, Any, Any]] = {
    "global": (lambda: FACTOR * 2, globals(), "FACTOR", 2.0),
    "global of a partial in a list": (lambda: FUNCTIONS[0](1.0), globals(), "FACTOR", 2.0),
    "global that a method reads": (lambda: HELPER.beta_one(), globals(), "HIDDEN", 2.0),
    "attribute of a computed name": (lambda: getattr(Named(), f"{'alpha'}_one"), Named, "alpha_one", 2.0),
    "method": (lambda: HELPER.beta_one(), Further, "beta_one", lambda self: 5.0),
    "method of the class above": (lambda: HELPER.beta_one(), Named, "beta_one", lambda self: 5.0),
    "operator": (lambda: HELPER.beta_one(), Further, "__len__", lambda self: 5),
    "method of an object": (lambda: HELPER.beta_one(), vars(HELPER), "beta_one", lambda: 5.0),
    "attribute that comes": (lambda: hasattr(HELPER, "bonus"), vars(HELPER), "bonus", 1),
    "global that comes": (lambda: "LATER" in globals(), globals(), "LATER", 1),
    "function of torch": (lambda: torch.nn.functional.relu, torch.nn.functional, "relu", torch.abs),
    "function that one of torch calls": (
        lambda: torch.nn.functional.cosine_embedding_loss(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1)),
        torch.nn.functional._Reduction,  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
        "get_enum",
        lambda reduction: 1,
    ),
    "forward of a layer": (lambda: torch.nn.ReLU()(torch.ones(1)), torch.nn.ReLU, "forward", lambda self, x: x),
    "attribute of an installed package's object": (lambda: FOREIGN.nested, vars(FOREIGN), "nested", {}),
    "entry": (lambda: ORDERED["a"], ORDERED, "a", 2.0),
    "entry that a method of C is given for": (lambda: max([1.0, 2.0], key=RANKS.get), RANKS, 2.0, 0),  # pyright: ignore[reportArgumentType, reportCallIssue]
    "size that torch gets": (lambda: torch.zeros(SIZES), SIZES, 0, 3),
    "list that torch makes a tensor of": (lambda: torch.tensor(SIZES), SIZES, 0, 3),
    "entry of an array of objects": (lambda: float(OBJECTS[0]), OBJECTS, 0, 2.0),
    "name that is imported": (imports, torch.utils.data, "default_collate", abs),
    "base of a class": (lambda: Moved.kept_under, Moved, "__bases__", (Below,)),
}


@contextlib.contextmanager
def replaced(holder: Any, name: Any, value: Any) -> Iterator[None]:
    if isinstance(holder, list | np.ndarray):
        before, holder[name] = holder[name], value
        yield
        holder[name] = before
    elif name == "__bases__":
        before, holder.__bases__ = holder.__bases__, value
        yield
        holder.__bases__ = before
    else:
        with pytest.MonkeyPatch.context() as patch:
            (patch.setitem if isinstance(holder, dict) else patch.setattr)(holder, name, value)
            yield


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_another_state_and_the_way_back_is_none(case: str) -> None:
    step, holder, name, value = CASES[case]
    guards = around(step)
    before, *rest = states(guards, 3)
    assert rest == [before, before]
    with replaced(holder, name, value):
        assert before not in states(guards, 2)
    assert states(guards, 2) == [before, before]


def test_proxies_are_not_asked() -> None:
    assert not is_user_object(Proxy())
    assert contents_of(Proxy()) is None


def test_changes_of_installed_objects_are_seen_at_once_and_those_for_nothing_no_longer_than_twice() -> None:
    guards = around(given(FOREIGN))
    before, *_ = states(guards, 3)
    found = []
    for value in (2, 3):
        FOREIGN.seen = value  # pyright: ignore[reportAttributeAccessIssue]
        found += states(guards, 1)
        if value == 2:
            guards.count_state(STEP, same=True)
    assert len({before, *found}) == 3
    with pytest.warns(UserWarning, match=r"a step reads .* of an installed package, which has changed 2 times"):
        guards.count_state(STEP, same=True)
    after = states(guards, 1)
    FOREIGN.seen = 4  # pyright: ignore[reportAttributeAccessIssue]
    assert states(guards, 1) == after
    del FOREIGN.seen  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("large", [TABLE, ARRAY], ids=["list", "array"])
def test_large_tables_are_compared_now_and_then_and_a_late_change_is_an_error(large: Any) -> None:
    guards = around(lambda: (sum(large), len(GAPS)))
    before, *_ = states(guards, 4)
    large[7] += 1.0
    seen = states(guards, 4)
    assert seen[0] == before and seen[-1] != before and len(set(seen)) == 2
    with pytest.raises(ChangedSurroundingsError, match="entries were changed in place") as raised:
        guards.count_state(STEP, same=False)
    assert not raised.value.recoverable
    large[7] = 0.0


def test_smaller_ones_are_compared_at_each_look() -> None:
    table = [0.0] * 90_000
    guards = around(lambda: sum(table))
    before, *_ = states(guards, 3)
    table[7] += 1.0
    assert before not in states(guards, 1)


@pytest.mark.parametrize(
    ("step", "holder"),
    [(lambda: sum(map(sum, MANY)), MANY[2900]), (lambda: repr(CHAIN), DEEPEST)],
    ids=["the last of thousands", "the end of a chain"],
)
def test_what_is_far_away_is_compared_as_one(step: Callable[[], Any], holder: list[float]) -> None:
    guards = around(step)
    before, *rest = states(guards, 3)
    assert rest == [before, before]
    with replaced(holder, 0, 3.0):
        assert before not in states(guards, 1)


def test_another_length_of_a_large_table_is_seen_at_once() -> None:
    guards = around(lambda: sum(TABLE))
    before, *_ = states(guards, 3)
    TABLE.append(1.0)
    after = states(guards, 3)
    assert before not in after and len(set(after)) == 1
    guards.count_state(STEP, same=False)
    TABLE.pop()


def _fills_table() -> None:
    TABLE[0] = 7.0


def _fills_array() -> None:
    ARRAY[0] = 7.0


def _adds_to_array() -> None:
    local = GAPS
    local += 1.0


def _sets_attribute() -> None:
    HELPER.seen = [1.0]


def _assigns() -> None:
    global COUNT
    COUNT += 1


def _draws() -> float:
    return GENERATOR.random()


def _takes() -> int:
    return next(ROWS)


REFUSED: dict[Callable[[], Any], str] = {
    _fills_table: r"changes the contents of .*TABLE",
    _fills_array: r"changes the contents of .*ARRAY",
    _adds_to_array: r"changes the contents of .*GAPS",
    _sets_attribute: r"changes the contents of .*HELPER",
    _assigns: r"assigns .*COUNT",
    _draws: r"draws from the random generator .*GENERATOR",
    _takes: r"it uses .*ROWS, an iterator",
}


@pytest.mark.parametrize("step", REFUSED)
def test_what_a_step_changes_outside_is_taken_back_and_named(step: Callable[[], Any]) -> None:
    drawn = GENERATOR.getstate()
    with pytest.raises(CaptureError, match=REFUSED[step]):
        around(step)
    assert (TABLE[0], float(ARRAY[0]), float(GAPS[0]), COUNT) == (0.0, 0.0, 1.0, 0)
    assert not hasattr(HELPER, "seen") and GENERATOR.getstate() == drawn


def test_the_object_that_is_to_be_followed_is_the_one_that_a_name_leads_to() -> None:
    with pytest.raises(ChangedSurroundingsError) as raised:
        around(_sets_attribute)
    assert list(raised.value.changed.values()) == [HELPER]


@functools.singledispatch
def dispatched(value: Any) -> float:
    return 1.0


def _registers() -> None:
    dispatched(1)
    dispatched.register(int, lambda value: 2.0)
    dispatched(1)


def test_what_a_step_registers_is_taken_back_wherever_it_is_kept() -> None:
    guards = PlaceGuards(torch.nn.Module(), {})
    guards.add_function(STEP, _registers)
    with guards.taken_back(STEP) as changed:
        _registers()
    with pytest.raises(ChangedSurroundingsError, match="singledispatch"):
        guards.refuse_changes(STEP, changed)
    assert dispatched(1) == 1.0


def _registers_what_holds_a_value() -> None:
    dispatched(1.0)
    with FakeTensorMode():
        value = torch.ones(())

    def held_by_itself(one: float) -> float:
        return float(value) if one else held_by_itself(one)

    dispatched.register(float, held_by_itself)


def test_a_value_of_the_step_stays_in_nothing_that_is_registered() -> None:
    guards = PlaceGuards(torch.nn.Module(), {})
    guards.add_function(STEP, _registers_what_holds_a_value)
    dispatched.register(float, lambda one: 3.0)  # as an eager step has left it
    dispatched(1.0)
    with guards.taken_back(STEP):
        _registers_what_holds_a_value()
    assert dispatched(1.0) == 3.0
