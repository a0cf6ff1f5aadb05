"""What a step stores, returns or gives to a call is described by what is in it: captures that differ are told apart."""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import threading
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torch_compat.step.effects.descriptions import describe
from torch_compat.step.host.slots import ValueSlot


@dataclasses.dataclass
class Row:
    value: Any
    note: str = dataclasses.field(default="", repr=False)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


class Numbers(bytearray):
    note = ""


class Kind(enum.Enum):
    A = 1
    B = 2


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def numbers_with(note: str) -> Numbers:
    found = Numbers(b"1")
    found.note = note
    return found


def looped(value: Any) -> list[Any]:
    held = Plain(value)
    held.value = (value, held)
    return [held]


MAKERS: dict[str, Callable[[int], Any]] = {
    "set": lambda n: {n, "a"},
    "frozenset": lambda n: frozenset({n}),
    "bytearray": lambda n: bytearray([n]),
    "array": lambda n: array.array("d", [n]),
    "attribute of a bytearray": lambda n: numbers_with(str(n)),
    "memoryview": lambda n: memoryview(bytes([n])),
    "ndarray": lambda n: np.full(1000, n),
    "array of objects": lambda n: np.array([Plain(n), None], object),
    "numpy number": lambda n: np.float32(n),
    "ctypes": lambda n: (ctypes.c_int * 2)(n, 1),
    "deque": lambda n: collections.deque([{n}]),
    "OrderedDict": lambda n: collections.OrderedDict(a={n}),
    "Counter": lambda n: collections.Counter("a" * n),
    "defaultdict": lambda n: collections.defaultdict(set, a={n}),
    "ChainMap": lambda n: collections.ChainMap({"a": n}),
    "UserList": lambda n: collections.UserList([n]),
    "mappingproxy": lambda n: types.MappingProxyType({"a": n}),
    "SimpleNamespace": lambda n: types.SimpleNamespace(value=n),
    "data class": lambda n: Row(n),
    "field of a data class that is not printed": lambda n: Row(0, str(n)),
    "object in a data class": lambda n: Row(Plain(n)),
    "slots": lambda n: Slotted(n),
    "object": lambda n: Plain([n]),
    "object in itself": looped,
    "method": lambda n: Plain(n).method,
    "closure": closure,
    "partial": lambda n: functools.partial(print, n),
    "StringIO": lambda n: io.StringIO(str(n)),
    "Decimal": lambda n: decimal.Decimal(n),
    "Fraction": lambda n: fractions.Fraction(n, 7),
    "datetime": lambda n: datetime.datetime(2000, 1, n, tzinfo=datetime.UTC),
    "Path": lambda n: pathlib.PurePosixPath(str(n)),
    "UUID": lambda n: uuid.UUID(int=n),
    "exception": lambda n: ValueError(n),
    "range": lambda n: range(n),
    "slice": lambda n: slice(n),
    "dtype": lambda n: (torch.float32, torch.float64)[n - 1],
    "device": lambda n: torch.device("cpu" if n == 1 else "meta"),
    "Size": lambda n: torch.Size([n]),
    "Enum": lambda n: Kind(n),
    "number of a type": lambda n: (1, True, 1.0)[n],
    "slot": lambda n: [ValueSlot("values", n)],
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_is_made_anew_is_described_by_its_contents(make: Callable[[int], Any]) -> None:
    first, again, other = make(1), make(1), make(2)
    for wrapped in (lambda one: one, lambda one: {"row": [one, 3]}):
        assert describe(wrapped(first)) == describe(wrapped(again))
        assert describe(wrapped(first)) != describe(wrapped(other))


def test_what_cannot_be_looked_into_or_was_there_before_is_described_by_which_it_is() -> None:
    for make in (threading.Lock, lambda: torch.ones(2), lambda: torch.nn.Linear(1, 1), Row):
        one, other = (make(1), make(1)) if make is Row else (make(), make())  # pyright: ignore
        there = {id(one), id(other)}
        assert describe(one, there) == describe(one, there)
        assert describe(one, there) != describe(other, there)


def test_a_large_value_ends() -> None:
    rows = [Plain([Plain(n)]) for n in range(5000)]
    assert describe(Plain(rows)) == describe(Plain(rows))
