"""Functions that are called before a step: which ones may be."""

from __future__ import annotations

import logging
import sys
from random import random as uniform_number
from typing import Any
from warnings import warn

import numpy as np
import pytest
import torch

from torch_compat.step.host.input_functions import has_no_state, input_functions

COUNTS = [0]
SHARE = 0.5
TABLE = np.arange(3)


def inner(n: int) -> np.ndarray:
    return np.random.permutation(n)[: int(n * SHARE)]


def outer(n: int) -> list[np.ndarray]:
    return [inner(n + more) for more in range(3)]


def counts(n: int) -> int:
    return n + COUNTS[0]


def calls_what_counts(n: int) -> int:
    return counts(n) + 1


def sets(n: int) -> int:
    global SHARE
    SHARE = 0.25
    return n


def sets_an_attribute(n: Any) -> int:
    n.seen = True
    return 1


def says(n: int) -> int:
    print(n)
    return n


def looks_up(n: int) -> int:
    return TABLE[n]


def gives_one_by_one(n: int) -> Any:
    yield n


def keeps(n: int, seen: list[int] = []) -> int:  # noqa: B006
    seen.append(n)
    return len(seen)


class Counted:
    made = 0

    def __init__(self) -> None:
        Counted.made += 1


HERE = sys.modules[__name__]
note = COUNTS.append


def by_a_module(n: int) -> int:
    return HERE.sets(n)


def makes_what_counts(n: int) -> int:
    Counted()
    return n


def notes(n: int) -> int:
    note(n)
    return n


def logs(n: int) -> int:
    logging.info("%d", n)
    return n


def warns(n: int) -> int:
    warn("again")
    return n


def draws_by_name(n: int) -> float:
    return n * uniform_number()


@pytest.mark.parametrize("function", [inner, outer, draws_by_name])
def test_functions_of_what_they_get_alone(function: Any) -> None:
    assert has_no_state(function)


@pytest.mark.parametrize(
    "function",
    [
        *(counts, calls_what_counts, sets, sets_an_attribute, says, looks_up, gives_one_by_one, keeps),
        *(by_a_module, makes_what_counts, notes, logs, warns),
    ],
)
def test_functions_with_a_state_or_another_effect(function: Any) -> None:
    assert not has_no_state(function)


def fails(n: int) -> int:
    raise ValueError(n)


def of_a_module(net: torch.nn.Module) -> int:
    return fails(len(list(net.children())))


def test_functions_on_the_way_to_an_error_that_get_no_module() -> None:
    with pytest.raises(ValueError, match="0") as caught:
        of_a_module(torch.nn.Sequential())
    found = input_functions(caught.value)
    assert fails in found and of_a_module not in found
