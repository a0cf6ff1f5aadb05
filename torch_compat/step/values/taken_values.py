"""Values taken from iterators by runs of a step's Python, which are given once more where such a run is taken back.

Nobody can put a generator back. So a step whose Python runs for every batch really takes from it, and what it took is kept until
the step has run. Where there is no such step after all, another run, or the step as it runs eagerly, gets the same values first.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

TAKING = frozenset({"__next__", "send"})
"""Methods of iterators that take from them."""


@dataclass
class _Taken:
    """An iterator, the outcomes of asking it, and how many of them the present run has had."""

    iterator: Any
    outcomes: list[Callable[[], Any]] = field(default_factory=list)
    had: int = 0
    put_back: Callable[[list[Any]], None] | None = None


class TakenValues:
    """The values taken from the iterators of the process, as long as no step has run with them.

    Attributes:
        takers: functions that have taken from one.
    """

    def __init__(self) -> None:
        self._taken: dict[int, _Taken] = {}
        self.takers: dict[types.FunctionType, None] = {}

    @property
    def waiting(self) -> bool:
        """Whether values were taken that no step has run with."""
        return any(one.outcomes for one in self._taken.values())

    def rewind(self) -> None:
        """Another run begins: it gets what the last one got."""
        for one in self._taken.values():
            one.had = 0

    def settle(self) -> None:
        """A step has run with what its run has got."""
        for one in self._taken.values():
            del one.outcomes[: one.had]
        self._taken = {key: one for key, one in self._taken.items() if one.outcomes}
        self.rewind()
        if not self._taken:
            self.takers.clear()

    def clear(self) -> None:
        """Nobody asks for what is left any more; what was taken ahead goes back."""
        for one in self._taken.values():
            if one.put_back is not None and (left := _values(one.outcomes[one.had :])):
                one.put_back(left)
        self._taken.clear()
        self.takers.clear()

    def is_left(self, iterator: Any) -> bool:
        """Whether the present run has not yet had all that was taken from an iterator."""
        one = self._taken.get(id(iterator))
        return one is not None and one.had < len(one.outcomes)

    def ahead(self, iterator: Any, count: int, put_back: Callable[[list[Any]], None]) -> list[Any]:
        """Take so many values before the step runs that wants them, unless that has happened.

        Args:
            put_back: puts those back that the step does not take.

        Raises:
            Exception: the iterator's own; it is given again, too.
        """
        one = self._taken.setdefault(id(iterator), _Taken(iterator, put_back=put_back))
        while len(one.outcomes) < count:
            one.outcomes.append(_outcome(functools.partial(next, iterator)))
            one.outcomes[-1]()
        return [outcome() for outcome in one.outcomes[:count]]

    def have_run(self, iterators: Iterable[Any]) -> None:
        """A step has run with all that was taken of these."""
        for one in iterators:
            self._taken.pop(id(one), None)

    def take(self, iterator: Any, ask: Callable[[], Any]) -> Any:
        """Take from the iterator by ``ask``; what was taken before comes first."""
        one = self._taken.setdefault(id(iterator), _Taken(iterator))
        if one.had == len(one.outcomes):
            one.outcomes.append(_outcome(ask))
        one.had += 1
        return one.outcomes[one.had - 1]()


TAKEN = TakenValues()
"""Of the iterators of this process."""


def _outcome(ask: Callable[[], Any]) -> Callable[[], Any]:
    """A function that gives, or raises, what ``ask()`` does."""
    try:
        value = ask()
    except Exception as error:
        return functools.partial(_raise, error)
    return lambda: value


def _values(outcomes: Iterable[Callable[[], Any]]) -> list[Any]:
    """The values among outcomes; an iterator that has raised is at its end."""
    found = []
    for one in outcomes:
        with contextlib.suppress(Exception):
            found.append(one())
    return found


def _raise(error: Exception) -> NoReturn:
    raise error
