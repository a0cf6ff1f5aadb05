"""The places that one run of a step's Python has read and changed."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_compat.step.guards.known_functions import AMBIENT
from torch_compat.step.guards.locations import Ambient, Entry, Function, Key, Location, Opaque, Variable
from torch_compat.step.guards.one_shot_objects import OneShotObject, is_iterator
from torch_compat.step.guards.origins import is_library
from torch_compat.step.host.batch_texts import TracedDict, TracedText, TracedTexts
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.values.generators import same_state, set_state, state_of
from torch_compat.step.values.marks import Same, inside, mark

OF_THE_STEP = (FakeTensor, FunctionalTensor, HostScalar, HostFuture, TracedText, TracedTexts, TracedDict, OneShotObject)


class NotedPlaces:
    """Places as they were when the step first met them.

    Args:
        kept_changes: the places that earlier runs of the step have changed in installed packages, which is added to.

    Attributes:
        iterators: the text of the place where it was found, by the id of an iterator: the step did not make it.
    """

    def __init__(self, kept_changes: dict[Key, Location] | None = None) -> None:
        self.iterators: dict[int, str] = {}
        self._streams: dict[int, tuple[Any, Any, str]] = {}
        self._first: dict[Key, tuple[Location, Hashable, Any]] = {}
        self._guards: set[Key] = set()
        self._of_libraries: set[Key] = set()
        self._kept_changes: dict[Key, Location] = {} if kept_changes is None else kept_changes
        self._ambient = {id(function): mark(function()) for function in AMBIENT}

    def note(self, location: Location, *, read: bool, of_library: bool) -> None:
        """Note a place; how it looks counts only where it is met for the first time.

        Args:
            read: whether the step depends on what is there, rather than only changes it.
            of_library: whether code of an installed package has met it.
        """
        key = location.key
        if key not in self._first:
            before = self._before(location)
            if type(before) is Same and not self._meet(before.value, location):
                return
            self._first[key] = (location, before, location.keep())
            if of_library:
                self._of_libraries.add(key)
            if read:
                self._guards.add(key)
        elif not of_library:
            self._of_libraries.discard(key)

    def _meet(self, value: Any, location: Location) -> bool:
        """Take note of what gives something else each time that it is asked; whether the place is to be noted."""
        if stands_in(value):
            return False
        if is_iterator(value):
            self.iterators.setdefault(id(value), location.text)
        elif id(value) not in self._streams and (state := state_of(value)) is not None:
            self._streams[id(value)] = (value, state, location.text)
        return True

    def _before(self, location: Location) -> Hashable:
        """The mark of a place before the step, as far as it is compared with what it is afterwards."""
        if isinstance(location, Ambient):
            return self._ambient[id(location.owner)]  # in the step a precision may have set another
        return None if isinstance(location, Function) else location.now()

    def settle(self, followed: Callable[[], Collection[int]]) -> tuple[list[Location], list[str]]:
        """To be called once the step's Python is over, and what it did has been taken back.

        Args:
            followed: gives the ids of what is taken back by others.

        Returns:
            places that the step has read, and names of what it has changed that nobody follows, which is as it was again.
        """
        self._drop_own()
        changed = [one for one in self._first.values() if one[1] is not None and one[0].now() != one[1]]
        if changed:
            gc.collect()
            del changed
            self._drop_own()
            changed = [one for one in self._first.values() if one[1] is not None and one[0].now() != one[1]]
            known = followed() if changed else ()
            changed = [one for one in changed if id(one[0].owner) not in known]
        texts = []
        for value, state, text in self._streams.values():
            if not same_state(state_of(value), state):
                set_state(value, state)
                texts.append(text)
        for location, _, kept in changed:
            if isinstance(location.owner, functools._lru_cache_wrapper):
                continue
            if self._is_kept(location):
                self._guards.discard(location.key)
                continue
            location.restore(kept)
            texts.append(location.text)
        texts += [location.text for location, _, _ in self._first.values() if isinstance(location, Opaque)]
        found = [location for key, (location, _, _) in self._first.items() if key in self._guards]
        self._first.clear()
        return found, texts

    def _is_kept(self, location: Location) -> bool:
        """Whether a change stays: the first of a place that only code of an installed package knows, as of a cache."""
        key = location.key
        if key not in self._of_libraries or key in self._kept_changes:
            return False
        now = [location.value()] if isinstance(location, Entry | Variable) else inside(location.owner)
        if any(stands_in(one) for one in now):
            return False
        self._kept_changes[key] = location
        return True

    def _drop_own(self) -> None:
        """Forget objects that nobody else holds: the step has made them, and no other step can meet them."""
        while True:
            own: Counter[int] = Counter()
            for location, before, kept in self._first.values():
                own[id(location.owner)] += 1
                own.update(map(id, _held_by(before)))
                own.update(map(id, _held_by_copy(kept, location)))
            gone = [key for key, (location, _, _) in self._first.items() if _references(location) <= own[id(location.owner)]]
            if not gone:
                return
            for key in gone:
                del self._first[key]
                self._guards.discard(key)


def _references(location: Location) -> int:
    return sys.getrefcount(location.owner) - 1


def _held_by(before: Any) -> Iterator[Any]:
    """The objects that a mark holds."""
    if type(before) is Same:
        yield before.value
    elif type(before) is tuple or type(before) is frozenset:
        for one in before:
            yield from _held_by(one)


def _held_by_copy(kept: Any, location: Location) -> Iterator[Any]:
    if isinstance(location, Entry):
        yield kept
    elif isinstance(kept, tuple):
        yield from kept
    elif isinstance(kept, dict):
        yield from kept.values()
    elif isinstance(kept, list | set) or type(kept).__name__ == "deque":
        yield from kept


def stands_in(value: Any) -> bool:
    """Whether a value is there only while a step is captured: a traced value, or a function that records its calls."""
    ours = type(value) is types.FunctionType and is_library(value.__globals__.get("__name__", ""))
    return type(value) in OF_THE_STEP or (ours and value.__globals__["__name__"].startswith(("torch_compat.", "xlatrain.")))
