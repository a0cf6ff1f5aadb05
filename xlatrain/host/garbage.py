"""Garbage collection, held off while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TypeVar

_T = TypeVar("_T")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch garbage collection off: where imports, captures and compilers make objects that stay, each full collection walks
    over all that there is, which takes a quarter of a second and finds nothing. For our own code, not around the user's data.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def let_stay() -> None:
    """Count all objects among the oldest, which only full collections look at, without walking over them.

    For imports: what is left of them stays, and would be walked over three times before it is old.
    """
    if gc.get_freeze_count() == 0:  # objects that somebody has frozen are to stay so
        gc.freeze()
        gc.unfreeze()


class Recent:
    """The objects made since: these alone are walked over, not all that the process holds, which takes half a second.

    To be made and used while garbage is :func:`uncollected`, so that they are the youngest. Where somebody has collected all the
    same, everything is looked at.
    """

    def __init__(self) -> None:
        let_stay()
        self._collections = _collections()

    def collect(self) -> None:
        """Free objects that are only held by each other."""
        if self._collections == _collections():
            gc.collect(0)
            self._collections = _collections()
        else:
            gc.collect()

    def instances(self, kind: type[_T]) -> list[_T]:
        """Objects of a class that are left, where it is one whose objects can be in reference cycles."""
        found: list[_T] = []
        for generation in (0, 1) if self._collections == _collections() else (None,):
            # A list of all objects is held by nobody: what holds it would be in it.
            found += [one for one in gc.get_objects(generation) if issubclass(type(one), kind)]
        return found


def _collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]
