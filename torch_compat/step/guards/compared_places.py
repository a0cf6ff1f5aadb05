"""All places that a step has read, compared before each step at once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from torch_compat.step.guards.identity_check import IdentityCheck
from torch_compat.step.guards.locations import PARTS, Entry, Function, Key, Kind, Large, Location, Lookup, Opaque, is_variable
from torch_compat.step.guards.origins import is_heap_type
from torch_compat.step.values.names import MISSING

_ORDER = operator.attrgetter("__mro__")


class Locations:
    """Places, and how they looked: whether they look otherwise now costs little.

    Args:
        found: the places.
        structure: of the module tree, which is compared elsewhere and counts as a place.

    Attributes:
        late: the place with many entries that was found to have changed some looks ago.
    """

    def __init__(self, found: Iterable[Location], structure: Hashable = ()) -> None:
        self.structure = structure
        self.late: Large | None = None
        self.marks = [(one, one.now()) for one in found]
        self._entries = [pair for pair in self.marks if isinstance(pair[0], Entry) and _is_asked(pair[0].owner)]
        self._lookups = [pair for pair in self.marks if _is_in_class(pair[0])]
        self._functions = [one.owner for one, _ in self.marks if isinstance(one, Function)]
        self._parts = list(itertools.chain.from_iterable(map(PARTS, self._functions)))
        self._objects = [one.owner for one, _ in self.marks if isinstance(one, Kind)]
        self._kinds = list(map(type, self._objects))
        self._classes = list({id(one.owner): one.owner for one, _ in self._lookups}.values())
        self._orders = list(map(_ORDER, self._classes))
        self._large = [one for one, _ in self.marks if isinstance(one, Large)]
        self._looks = 0
        apart = {id(one) for one, _ in (*self._entries, *self._lookups)}
        kinds = (Function, Kind, Opaque, Large)
        self._others = [pair for pair in self.marks if id(pair[0]) not in apart and not isinstance(pair[0], kinds)]
        self._hold()

    def _hold(self) -> None:
        holders: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        missing: list[Location] = []
        for one, _ in self._entries:
            value = one.value()
            if value is MISSING:
                missing.append(one)
            else:
                holders.setdefault(id(one.owner), (one.owner, {}))[1][one.name] = value
        classes: dict[type, dict[str, Any]] = {}
        above: set[type] = set()  # of those that give it: what is added there comes first
        for one, _ in self._lookups:
            for kind in one.owner.__mro__:
                if one.name in kind.__dict__:
                    classes.setdefault(kind, {})[one.name] = kind.__dict__[one.name]
                    break
                if is_heap_type(kind):  # others cannot get attributes
                    above.add(kind)
                    classes.setdefault(kind, {})
        self._absent = [one.owner for one in missing], [one.name for one in missing]
        self._held = IdentityCheck(
            [
                *((holder, values, True) for holder, values in holders.values()),
                *((vars(kind), values, kind not in above) for kind, values in classes.items()),
            ]
        )

    def changed(self) -> bool:
        if self._held.changed() or any(map(dict.__contains__, *self._absent)):
            if any(one.now() != before for one, before in (*self._entries, *self._lookups)):
                return True
            self._hold()
        if not all(map(operator.is_, itertools.chain.from_iterable(map(PARTS, self._functions)), self._parts)):
            return True
        if not all(map(operator.is_, map(type, self._objects), self._kinds)):
            return True
        if not all(map(operator.is_, map(_ORDER, self._classes), self._orders)):  # other bases
            if any(one.now() != before for one, before in self._lookups):
                return True
            self._orders = list(map(_ORDER, self._classes))
            self._hold()
        for one, before in self._others:
            if one.now() != before:
                return True
        return bool(self._large) and self._large_changed()

    def _large_changed(self) -> bool:
        self._looks += 1
        for one in self._large:
            if one.differs(self._looks):
                self.late = None if one.every == 1 or one.has_other_length else one
                return True
        return False

    def parts(self) -> dict[Key, Hashable]:
        """The marks of the places."""
        return {one.key: now for one, now in self.marks}

    def tensors(self) -> dict[Hashable, Hashable]:
        """The part of it that two compared runs of a step do not show, since they see shapes only."""
        found: dict[Hashable, Hashable] = {"structure": self.structure}
        for one, now in self.marks:
            if isinstance(one.owner, np.ndarray):
                found[one.key] = now
            elif is_variable(one) and isinstance(value := one.value(), torch.Tensor | torch.nn.Module):
                found[one.key] = id(value)
        return found


def _is_asked(holder: Any) -> bool:
    """Whether a dict is only asked by ``holder[name]``, and makes no entry."""
    return isinstance(holder, dict) and not hasattr(type(holder), "__missing__")


def _is_in_class(place: Location) -> bool:
    return (
        isinstance(place, Lookup)
        and isinstance(place.owner, type)
        and any(place.name in vars(one) for one in place.owner.__mro__)
    )
