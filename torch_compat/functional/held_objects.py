"""Objects in a dict, compared with what they were: many at once, since it is done before every step."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any


class HeldObjects:
    """Whether the same objects are in a dict as before, at some 20 ns for each.

    Args:
        holder: the dict, or the mapping proxy of a class.
        values: those of its entries that count.
        grows: whether it may get more entries; else its length counts too.
    """

    __slots__ = ("_get", "_holder", "_length", "_values")

    def __init__(self, holder: Mapping[str, Any], values: Mapping[str, Any], *, grows: bool) -> None:
        self._holder = holder
        names = [*values] * (2 if len(values) == 1 else 1)  # of a single name itemgetter gives no tuple
        self._get = operator.itemgetter(*names) if names else None
        self._values = tuple(values[name] for name in names)
        self._length = None if grows else len(holder)

    def changed(self) -> bool:
        """Whether one of them is another object, or gone."""
        holder = self._holder
        if self._length is not None and len(holder) != self._length:
            return True
        try:
            return self._get is not None and not all(map(operator.is_, self._get(holder), self._values))
        except KeyError:
            return True
