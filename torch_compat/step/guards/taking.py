"""Functions that take from iterators: what they took for a step that did not run is given once more."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch_compat.step.guards.instrumented import Instrumented
from torch_compat.step.guards.one_shot_objects import is_iterator
from torch_compat.step.values.taken_values import TAKEN, TAKING, TakenValues


def is_taking(function: Any) -> bool:
    """Whether a function is ``next``, or a method of an iterator that takes from it."""
    if function is next:
        return True
    return getattr(function, "__name__", "") in TAKING and is_iterator(getattr(function, "__self__", None))


def iterator_of(function: Any, args: tuple[Any, ...]) -> Any:
    """The iterator from which ``function(*args)`` takes."""
    return (args[0] if args else None) if function is next else function.__self__


def take(taken: TakenValues, function: Any, args: tuple[Any, ...]) -> Any:
    """``function(*args)``; what was taken before comes first."""
    if function is not next:
        return taken.take(function.__self__, functools.partial(function, *args))
    iterator, *default = args
    try:
        return taken.take(iterator, functools.partial(next, iterator))
    except StopIteration:
        if not default:
            raise
        return default[0]


@contextlib.contextmanager
def given_again() -> Iterator[None]:
    """Within the block functions get what runs of a step have taken from iterators in vain, as if that had not been."""
    if not TAKEN.waiting:
        yield
        return
    TAKEN.rewind()
    functions = Instrumented(_Giving())
    for function in TAKEN.takers:
        functions.add(function)
    try:
        with functions:
            yield
    finally:
        TAKEN.clear()


class _Giving:
    """An observer to which reads are nothing."""

    of_library = False

    def enter(self, key: str) -> None: ...

    def attribute(self, owner: Any, name: str) -> None: ...

    def entry(self, holder: Any, key: Any) -> None: ...

    def value(self, value: Any) -> None: ...

    def stores(self, owner: Any, name: str) -> None: ...

    def updates(self, owner: Any, name: str) -> None: ...

    def fills(self, holder: Any) -> None: ...

    def member(self, item: Any, holder: Any) -> None: ...

    def source(self, source: Any, names: dict[str, Any], variables: Mapping[str, Any]) -> None: ...

    def call(self, function: Any) -> Any:
        return functools.partial(self._given, function) if is_taking(function) else function

    @staticmethod
    def _given(function: Any, *args: Any) -> Any:
        return take(TAKEN, function, args) if TAKEN.is_left(iterator_of(function, args)) else function(*args)
