"""Identity checks: objects in dicts compared with what they were, many at once, before every step, by no line of Python each."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_CALL: Any = operator.call  # its own type is too narrow for map's


class IdentityCheck:
    """A check that mappings hold the same objects as before, at some 20 ns for each.

    Args:
        held: triples of a dict, or a mapping proxy of a class; its entries that are compared; and whether it may get further
            entries, else its length is compared too.
    """

    __slots__ = ("_empty", "_getters", "_holders", "_lengths", "_sized", "_values")

    def __init__(self, held: Iterable[tuple[Mapping[str, Any], Mapping[str, Any], bool]]) -> None:
        self._getters: list[Callable[[Mapping[str, Any]], tuple[Any, ...]]] = []
        self._holders: list[Mapping[str, Any]] = []
        self._values: list[Any] = []
        self._sized: list[Mapping[str, Any]] = []
        for holder, values, grows in held:
            if names := [*values] * (2 if len(values) == 1 else 1):  # of a single name itemgetter gives no tuple
                self._getters.append(operator.itemgetter(*names))
                self._holders.append(holder)
                self._values += [values[name] for name in names]
            if not grows:
                self._sized.append(holder)
        self._empty = [holder for holder in self._sized if not holder]  # most dicts of hooks; any() is faster than their lengths
        self._sized = [holder for holder in self._sized if holder]
        self._lengths = list(map(len, self._sized))

    def changed(self) -> bool:
        """Whether one of the objects is another object, or gone, or an entry has come."""
        if any(self._empty) or list(map(len, self._sized)) != self._lengths:
            return True
        try:
            now = itertools.chain.from_iterable(map(_CALL, self._getters, self._holders))
            return not all(map(operator.is_, now, self._values))
        except KeyError:
            return True
