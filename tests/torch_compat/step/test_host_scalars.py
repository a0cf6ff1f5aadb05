"""Counters of the loop inside a captured step: what becomes an input, what becomes a guard."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.host.number_functions import as_float
from torch_compat.step.host.scalar_plan import SLOTS, scalar_inputs
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from xlatrain.bridge.errors import CaptureError

NOW = {"batch_idx": 7, "current_epoch": 2, "global_step": 30}
LATER = {"batch_idx": 12, "current_epoch": 5, "global_step": 90}


def values(**numbers: int) -> HostValues:
    return HostValues(HostNumbers(numbers))


def make_tracer() -> ScalarTracer:
    return ScalarTracer(values(**NOW), torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS))


ARITHMETIC: dict[str, Callable[[Any], Any]] = {
    "sum": lambda i: i + 1,
    "reversed sum": lambda i: 1 + i,
    "difference": lambda i: i - 3,
    "reversed difference": lambda i: 3 - i,
    "product": lambda i: 0.5 * i,
    "quotient": lambda i: i / 4,
    "reversed quotient": lambda i: 100 / i,
    "floor": lambda i: i // 3,
    "reversed floor": lambda i: 100 // i,
    "remainder": lambda i: i % 5,
    "reversed remainder": lambda i: 100 % i,
    "power": lambda i: i**2,
    "reversed power": lambda i: 2**i,
    "negative": operator.neg,
    "positive": operator.pos,
    "absolute": lambda i: abs(i - 100),
    "rounded": lambda i: round(i / 3, 1),
    "truncated": lambda i: math.trunc(i / 2),
    "floored": lambda i: math.floor(i / 2),
    "ceiled": lambda i: math.ceil(i / 2),
    "of itself": lambda i: i * i + i,
    "least with a number of numpy's": lambda i: np.minimum(0.5 * i, np.log(40)),
    "clipped by numpy": lambda i: np.clip(0.1 * i, 0.0, 1.0),
    "interpolated by numpy": lambda i: np.interp(i, [0, 10, 20], [0.0, 1.0, 5.0]),
    "a sigmoid of numpy's": lambda i: 1 / (1 + np.exp(-0.25 * (i - 10))),
    "as a fraction": lambda i: as_float(i) * 2,
}


@pytest.mark.parametrize("function", ARITHMETIC.values(), ids=ARITHMETIC)
def test_arithmetic_stays_an_expression_over_later_counters(function: Callable[[Any], Any]) -> None:
    tracer = make_tracer()
    found = function(tracer.counter("batch_idx"))
    assert type(found) is HostScalar
    expression, _ = found.deferred()
    assert expression(values(**NOW)) == function(NOW["batch_idx"])
    assert expression(values(**LATER)) == function(LATER["batch_idx"])
    assert tracer.plan.guards == []  # nothing was assumed


@pytest.mark.parametrize("numbers", [[1.0, 0.5, 0.25], (3, 2, 1), [0.1 * i for i in range(20)], np.linspace(0, 1, 9)], ids=len)
def test_an_entry_of_a_list_of_numbers_is_an_expression(numbers: list[float] | tuple[int, ...]) -> None:
    tracer = make_tracer()
    found = tracer.counter("current_epoch").entry_of(numbers)
    assert type(found) is HostScalar
    assert found.deferred()[0](values(**NOW)) == numbers[2]
    assert found.deferred()[0](values(**{**NOW, "current_epoch": 1})) == numbers[1]
    assert tracer.plan.holds(values(**{**NOW, "current_epoch": 1}))
    assert not tracer.plan.holds(values(**{**NOW, "current_epoch": len(numbers)}))


def test_an_entry_of_a_dict_is_an_expression() -> None:
    tracer, numbers = make_tracer(), {2: 0.5, 5: 0.25}
    found = tracer.counter("current_epoch").entry_of(numbers)
    assert [found.deferred()[0](values(**now)) for now in (NOW, LATER)] == [0.5, 0.25]
    assert tracer.plan.holds(values(**LATER))
    assert not tracer.plan.holds(values(**{**LATER, "current_epoch": 3}))
    with pytest.raises(KeyError, match="7"):
        tracer.counter("batch_idx").entry_of(numbers)


def test_an_entry_or_another_number_is_an_expression_that_assumes_nothing() -> None:
    tracer = make_tracer()
    found = tracer.counter("current_epoch").get_of({2: 0.5}, 1.0)
    assert [found.deferred()[0](values(**now)) for now in (NOW, LATER)] == [0.5, 1.0]
    assert tracer.plan.guards == []
    assert tracer.counter("current_epoch").get_of({2: "a"}) == "a"
    assert tracer.counter("batch_idx").get_of({2: "a"}) is None


@pytest.mark.parametrize("holder", [[2, 3], (2, 3), {2, 3}, frozenset({2, 3}), {2: "a"}, range(0, 4, 2), [2, "a", None]], ids=str)
def test_whether_it_is_in_a_holder_guards_on_the_answer(holder: Any) -> None:
    tracer = make_tracer()
    assert tracer.counter("current_epoch").is_in(holder) is True
    assert not tracer.counter("batch_idx").is_in(holder)
    assert tracer.plan.holds(values(batch_idx=9, current_epoch=2, global_step=0))
    assert not tracer.plan.holds(values(batch_idx=2, current_epoch=2, global_step=0))
    assert not tracer.plan.holds(values(batch_idx=9, current_epoch=9, global_step=0))


@pytest.mark.parametrize("holder", [[1, 0.5, 0.25], ["a", "b", "c"], [True, False, True], "abc"], ids=str)
def test_another_entry_is_what_it_is_now(holder: Any) -> None:
    tracer = make_tracer()
    assert tracer.counter("current_epoch").entry_of(holder) is holder[2]
    assert not tracer.plan.holds(values(**LATER))


def test_an_entry_that_is_not_there_is_pythons_error() -> None:
    with pytest.raises(IndexError, match="list index out of range"):
        make_tracer().counter("batch_idx").entry_of([1.0, 2.0])


def test_the_least_of_a_number_that_grows_and_one_of_numpys_is_one_program() -> None:
    tracer = make_tracer()
    found: Any = min(0.02 * tracer.counter("batch_idx") / 25, np.log(40))
    assert type(found) is HostScalar
    assert tracer.plan.holds(values(**LATER))
    assert not tracer.plan.holds(values(**{**LATER, "batch_idx": 10**6}))


def test_two_counters_make_one_expression() -> None:
    tracer = make_tracer()
    expression, _ = (tracer.counter("global_step") / (tracer.counter("current_epoch") + 1)).deferred()
    assert expression(values(**LATER)) == 15.0


COMPARISONS: dict[str, tuple[Callable[[Any], bool], bool]] = {  # and whether it comes out otherwise later
    "less": (lambda i: i < 10, True),
    "at most": (lambda i: i <= 20, False),
    "more": (lambda i: i > 10, True),
    "at least": (lambda i: i >= 7, False),
    "equal": (lambda i: i == 7, True),
    "not equal": (lambda i: i != 3, False),
    "every fifth": (lambda i: i % 5 == 2, False),
    "truth": (bool, False),
    "less than a number of numpy's": (lambda i: bool(np.float64(10) > i), True),
    "finite, as numpy says": (lambda i: bool(np.isfinite(i)), False),
    "truth of a remainder": (lambda i: bool(i % 4), True),
    "chained": (lambda i: 5 < i < 10, True),
}


@pytest.mark.parametrize(("function", "changes"), COMPARISONS.values(), ids=COMPARISONS)
def test_a_comparison_guards_on_its_outcome(function: Callable[[Any], bool], changes: bool) -> None:
    tracer = make_tracer()
    assert function(tracer.counter("batch_idx")) is function(NOW["batch_idx"])
    assert tracer.plan.holds(values(**NOW))
    assert tracer.plan.holds(values(**LATER)) is not changes
    assert changes is (function(LATER["batch_idx"]) != function(NOW["batch_idx"]))


EXACT: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "text": str,
    "representation": repr,
    "format": lambda i: f"{i:03d}",
    "index": lambda i: list(range(100))[i],
    "range": lambda i: list(range(i)),
    "key": lambda i: {7: "a"}.get(i),
    "method": lambda i: i.bit_length(),
    "item": lambda i: int(i),
    "math": math.sqrt,
    "tensor": lambda i: torch.full((2,), i).tolist(),
}


@pytest.mark.parametrize("function", EXACT.values(), ids=EXACT)
def test_a_use_that_needs_the_value_guards_on_exactly_it(function: Callable[[Any], Any]) -> None:
    tracer = make_tracer()
    assert function(tracer.counter("batch_idx")) == function(7)
    assert tracer.plan.holds(values(**{**LATER, "batch_idx": 7}))
    assert not tracer.plan.holds(values(**{**LATER, "batch_idx": 8}))


def test_it_passes_for_a_number() -> None:
    tracer = make_tracer()
    counter = tracer.counter("batch_idx")
    assert isinstance(counter, int)
    assert isinstance(counter / 2, float)
    assert tracer.plan.guards == []


def test_tensor_arithmetic_reads_an_input_of_the_program() -> None:
    wholes, fractions = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS)
    tracer = ScalarTracer(values(**NOW), wholes, fractions)
    wholes[0], fractions[0] = 1000, 0.125  # what a later step feeds: the result must be computed from it, not from NOW
    epoch = tracer.counter("current_epoch")
    assert (torch.ones(2) * epoch).tolist() == [1000.0, 1000.0]
    assert (torch.ones(2) + epoch / 4).tolist() == [1.125, 1.125]
    assert tracer.plan.guards == []
    ints, floats = tracer.plan.inputs(values(**LATER))
    assert (ints[0], floats[0]) == (5, 1.25)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_beside_a_tensor_it_does_not_promote(dtype: torch.dtype) -> None:
    assert (torch.ones(2, dtype=dtype) * make_tracer().counter("batch_idx")).dtype == dtype


def test_an_expression_used_twice_takes_one_input() -> None:
    tracer = make_tracer()
    for _ in range(3 * SLOTS):
        torch.ones(1) * (tracer.counter("global_step") + 1)  # pyright: ignore[reportUnusedExpression]
    assert (len(tracer.plan.wholes), len(tracer.plan.fractions)) == (1, 0)


def test_too_many_expressions_are_refused_with_the_last_one() -> None:
    tracer = make_tracer()
    with pytest.raises(CaptureError, match=rf"more than {SLOTS} expressions .*\(global_step \+ {SLOTS}\)"):
        for n in range(SLOTS + 1):
            torch.ones(1) * (tracer.counter("global_step") + n)  # pyright: ignore[reportUnusedExpression]


def test_a_step_without_counters_has_no_such_inputs() -> None:
    tracer = make_tracer()
    assert tracer.counter("batch_idx") < 100
    assert tracer.plan.is_empty
    assert tracer.plan.inputs(values(**NOW)) == ()
    ints, floats, scale = scalar_inputs(["scale"], without=tracer.plan.is_empty)  # the graph has its inputs all the same
    assert (ints.shape, floats.shape, scale) == ((SLOTS,), (SLOTS,), "scale")


def test_guards_of_one_text_are_kept_once() -> None:
    tracer = make_tracer()
    for _ in range(5):
        assert tracer.counter("batch_idx") < 100
    assert len(tracer.plan.guards) == 1


def test_what_compares_with_something_else_is_not_equal() -> None:
    tracer = make_tracer()
    assert (tracer.counter("batch_idx") == "7") is False
    with pytest.raises(TypeError):
        tracer.counter("batch_idx") + "7"  # pyright: ignore[reportUnusedExpression]
