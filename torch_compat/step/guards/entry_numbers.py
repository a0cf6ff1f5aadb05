"""Numbers in dicts, lists and plain objects that a step changes: they are inputs of its programs.

``self.seen["n"] += 1`` leaves another number for each step. Such a number is like one in an attribute of the module: while the
step is captured a counter stands in its place, and what the step makes of it is computed on the host for each step anew.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_compat.step.effects.effects import Effects
from torch_compat.step.effects.held_place import HeldPlace
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from torch_compat.step.values.dict_contents import set_entry

_NUMBERS = (int, float)
_MOST_ENTRIES = 16
"""Numbers of a list that are inputs each; a longer list has none."""


@dataclass
class EntryNumbers:
    """The numbers at places below ``roots`` (name → object) that are inputs of steps.

    Args:
        step: the step that is being captured.
    """

    roots: Mapping[str, Any]
    step: str = ""
    _places: dict[str, dict[HeldPlace, str]] = field(default_factory=dict)
    _exact: dict[str, set[HeldPlace]] = field(default_factory=dict)

    def learn(
        self, step: str, effects: Effects, owned: Collection[int], is_read: Callable[[Any, Any], bool] | None = None
    ) -> bool:
        """The numbers that ``step`` changes become its inputs; False where there are none that are not.

        Args:
            owned: ids of objects whose attributes are inputs otherwise.
            is_read: whether it reads an entry, of which it is given the holder and the key: only those that it reads, then, and
                also where it puts there what comes later.
        """
        known, exact = self._places.setdefault(step, {}), self._exact.get(step, set())
        new = [one for one in self._changed_by(effects, owned, is_read) if one not in known and one not in exact]
        for one in new:
            known[one] = _name(one, known.values())
        return bool(new)

    def _changed_by(
        self, effects: Effects, owned: Collection[int], is_read: Callable[[Any, Any], bool] | None
    ) -> Iterator[HeldPlace]:
        for place, value in _changed_places(effects):
            now = type(place.value(self.roots))
            if now not in _NUMBERS or (place.is_attribute and id(place.holder.find(self.roots)) in owned):
                continue
            if now is type(value) if is_read is None else is_read(place.contents(self.roots), place.key):
                yield place

    def demote(self, step: str) -> bool:
        """The inputs of ``step`` are constants of its programs from now on; False where there are none."""
        found = self._places.pop(step, {})
        self._exact.setdefault(step, set()).update(found)
        return bool(found)

    def forget(self, step: str) -> None:
        """Let go of what is known of a step that is no more."""
        self._places.pop(step, None)
        self._exact.pop(step, None)

    def kinds(self, step: str) -> Hashable:
        """The part of the key of a program of ``step``: where there is a number, and of which type."""
        places = self._places.get(step)
        if not places:
            return None
        values = [type(one.value(self.roots)) for one in places]
        return tuple(kind if kind in _NUMBERS else None for kind in values)

    def fill(self, step: str, numbers: dict[str, Any]) -> None:
        """Put the present ones among the numbers of ``step``."""
        for one, name in self._places.get(step, {}).items():
            if type(value := one.value(self.roots)) in _NUMBERS:
                numbers[name] = value

    @contextlib.contextmanager
    def standing_in(self, tracer: ScalarTracer, host_values: HostValues) -> Iterator[None]:
        """Within the block counters are in the places of the step's numbers; those that stay are taken away on leaving it."""
        put: dict[int, tuple[Any, list[tuple[Any, Any, HostScalar]]]] = {}
        for one, name in self._places.get(self.step, {}).items():
            contents, value = one.contents(self.roots), one.value(self.roots)
            if type(value) in _NUMBERS and name in host_values.numbers:
                counter = tracer.counter(name)
                put.setdefault(id(contents), (contents, []))[1].append((one.key, value, counter))
                _put(contents, one.key, counter)
        try:
            yield
        finally:
            for contents, several in put.values():
                if isinstance(contents, dict):
                    several = [one for one in several if dict.get(contents, one[0]) is one[2]]
                elif any(len(contents) <= key or contents[key] is not counter for key, _, counter in several):
                    continue  # the list is taken back as a whole, and what is left there of counters is part of the change
                for key, value, _ in several:
                    _put(contents, key, value)


def _changed_places(effects: Effects) -> Iterator[tuple[HeldPlace, Any]]:
    for record in effects.records:
        if record.kind in ("setitem", "setattr"):
            yield HeldPlace(record.place, record.key, record.kind == "setattr"), record.value
        elif record.kind == "contents" and isinstance(record.value, list) and len(record.value) <= _MOST_ENTRIES:
            yield from ((HeldPlace(record.place, index, is_attribute=False), one) for index, one in enumerate(record.value))


def _name(place: HeldPlace, taken: Collection[str]) -> str:
    """The text of a place, with a number where another one has it."""
    texts = (f"{place} ({n})" if n > 1 else str(place) for n in itertools.count(1))
    return next(one for one in texts if one not in taken)


def _put(contents: Any, key: Any, value: Any) -> None:
    if isinstance(contents, dict):
        set_entry(contents, key, value)
    else:
        contents[key] = value
