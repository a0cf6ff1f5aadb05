"""The places that one run of a step's Python has read and changed."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_compat.step.guards.known_functions import AMBIENT, VALUES
from torch_compat.step.guards.locations import (
    Ambient,
    Attribute,
    Contents,
    Entry,
    Function,
    Item,
    Key,
    Kind,
    Location,
    Lookup,
    Member,
    Opaque,
    Stream,
    Values,
    Variable,
    is_variable,
)
from torch_compat.step.guards.one_shot_objects import is_consumed, is_found, is_iterator, refuse, refuse_kept_in_c, runs_no_code
from torch_compat.step.guards.origins import is_house, is_kept_in_c, is_library, is_noted, is_third_party
from torch_compat.step.guards.param_groups import ParamGroups
from torch_compat.step.guards.pulled_places import Given
from torch_compat.step.host.arrays import HostArray
from torch_compat.step.host.batch_texts import TracedDict, TracedText, TracedTexts
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.host_memory import note_met
from torch_compat.step.host.later_text import LaterText
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.values.generators import state_of, use_of
from torch_compat.step.values.kept_in_c import keeps_in_c, kept_alone
from torch_compat.step.values.marks import PLAIN, Same, has_contents, inside, mark
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.own_dict import OwnDict
from torch_compat.step.values.taken_values import TakenValues
from torch_compat.step.values.user_objects import attributes_of, may_be_followed
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows
from xlatrain.bridge.capture.stand_ins import is_still
from xlatrain.bridge.patches import is_for_a_time

_OF_STREAMS = (
    "Keep a generator as an attribute of the module (self.rng), where draws are made anew for every step, or "
    "draw with torch (torch.rand, …); use a file in a hook."
)
_JUST_MADE = 3
"""References to what a call has given, as they are counted here."""
_NOT_FOLLOWED = (torch.nn.Module, torch.optim.Optimizer, types.ModuleType)
OF_THE_STEP = (
    FakeTensor,
    FunctionalTensor,
    MaskedRows,
    HostArray,
    HostScalar,
    HostFuture,
    LaterText,
    TracedText,
    TracedTexts,
    TracedDict,
)
TRANSPARENT = frozenset({*VALUES, *OF_THE_STEP, OwnDict, Given})
"""Classes of what holds nothing that a step may read besides the value itself."""


@dataclass(frozen=True)
class Change:
    """A change by the step that nobody takes back but the notes.

    Attributes:
        does: what the step does, after its name.
        name: of the object that is changed, or that leads there.
        value: this object; None where its changes cannot be recorded.
        advice: what to do instead, where that is not what is said of all others.
        redo: puts what the step left there once more; None where that cannot be.
    """

    does: str
    name: str = ""
    value: Any = None
    advice: str = ""
    redo: Callable[[], None] | None = None


KeptChanges = dict[Key, tuple[Location, Any]]
"""By place, the place and what :meth:`Location.restore` puts there: what it was before."""


class NotedPlaces:
    """Places as they were when the step first met them.

    Args:
        follow: told about a place that is met for the first time, and the value that is in it.
        kept_changes: the places that earlier runs of the step have changed in installed packages, which is added to.

    Attributes:
        iterators: the text of the place where it was found, by the id of an iterator: the step did not make it.
        of_library: whether code of an installed package meets what is noted now.
        taken: what the step has taken from iterators; None where it may not.
    """

    taken: TakenValues | None = None

    def __init__(self, follow: Callable[[Location, Any], None], kept_changes: KeptChanges | None = None) -> None:
        self.iterators: dict[int, str] = {}
        self.of_library = False
        self._made: dict[int, Any] = {}  # objects that keep what they hold in C
        self._follow = follow
        self._one_shots: dict[int, str] = {}  # iterators and mocks that names lead to
        self._first: dict[Key, tuple[Location, Hashable, Any]] = {}
        self._guards: set[Key] = set()
        self._of_libraries: set[Key] = set()
        self._kept_changes: KeptChanges = {} if kept_changes is None else kept_changes
        self._leads: dict[int, Key] = {}  # where an object was found, by its id: whether the step made it is seen by who holds it
        self._objects: dict[int, tuple[int, type]] = {}  # whose attributes a dict has
        self._ambient = {id(function): mark(function()) for function in AMBIENT}

    def note(self, location: Location, *, read: bool) -> None:
        """Note a place; how it looks counts only where it is met for the first time.

        Args:
            read: whether the step depends on what is there, rather than only changes it.
        """
        key = location.key
        if key in self._first:
            if not self.of_library:
                self._of_libraries.discard(key)
            if read and isinstance(location, Contents):  # which the step may have changed before: not all that is there
                self._guards.add(key)
            return
        value = location.value()
        if stands_in(value):
            return
        note_met(location.owner)
        before = self._before(location)
        if type(before) is Same:
            self._meet(before.value, location)
        self._first[key] = (location, before, location.keep())
        if self.of_library:
            self._of_libraries.add(key)
        if read:
            self._guards.add(key)
        if type(value) not in TRANSPARENT and value is not MISSING and not isinstance(location, Contents):
            self.leads(key, value)
            self._follow(location, value)

    def name(self, location: Entry | Variable | Lookup) -> None:
        """Note a place that a name leads to."""
        self.note(location, read=True)
        value = location.value()
        if is_consumed(value):
            self._one_shots[id(value)] = location.text

    def takes(self, value: Any) -> bool:
        """Whether it is an iterator that the step has found, and may take from."""
        if self.taken is None or not is_iterator(value):
            return False
        return (id(value) in self.iterators or id(value) in self._one_shots or is_found(value)) and runs_no_code(value)

    def check_usable(self, value: Any) -> None:
        """Refuse an iterator or a mock that a name leads to, and an object of a class whose changes could not be taken back.

        Raises:
            CaptureError: by name.
        """
        if id(value) in self._one_shots:
            refuse(self._one_shots[id(value)])
        if is_kept_in_c(type(value)):
            refuse_kept_in_c(type(value).__name__)

    def check_changed(self, value: Any) -> None:
        """Refuse what may change an object that keeps what it holds in C, but for one that the step has made.

        Raises:
            CaptureError: by name.
        """
        if keeps_in_c(type(value)) and id(value) not in self._made and not any(value is one for one in _standard_streams()):
            refuse_kept_in_c(type(value).__name__)

    def makes(self, value: Any) -> None:
        """The step's Python has called something that gave ``value``: nobody else holds what it has made."""
        if sys.getrefcount(value) <= _JUST_MADE:
            self._made |= {id(one): one for one in ([value] if keeps_in_c(type(value)) else kept_alone(value))}

    def leads(self, key: Key, value: Any) -> None:
        """``value`` was found at a place."""
        self._leads.setdefault(id(value), key)

    def has_attributes(self, owner: Any, held: dict[str, Any]) -> None:
        """``held`` has the attributes of ``owner``."""
        self._objects[id(held)] = id(owner), type(owner)

    def _meet(self, value: Any, location: Location) -> None:
        """Take note of what gives something else each time that it is asked."""
        if is_iterator(value):
            self.iterators.setdefault(id(value), location.text)
        elif state_of(value) is not None and not any(value is one for one in _standard_streams()):
            self.note(Stream(value, location.text), read=False)

    def _before(self, location: Location) -> Hashable:
        """The mark of a place before the step, as far as it is compared with what it is afterwards."""
        if isinstance(location, Ambient):
            return self._ambient[id(location.owner)]  # in the step a precision may have set another
        return None if isinstance(location, Function | ParamGroups) else location.now()  # stand-ins are in the groups

    def settle(self, followed: Callable[[], Collection[int]], *, attended: bool = False) -> tuple[list[Location], list[Change]]:
        """To be called once the step's Python is over, and what it did has been taken back.

        Args:
            followed: gives the ids of what is taken back by others.
            attended: whether changes of objects that the step has made, and that garbage still holds, are as good as others.

        Returns:
            places that the step has read, and what it has changed that nobody follows, which is as it was again.
        """
        self._made.clear()
        self._drop_own()
        for location, _, kept in self._first.values():
            _put_back_tensor(location, kept)
        changed = [one for one in self._first.values() if one[1] is not None and one[0].now() != one[1]]
        if changed and not all(_is_one_of(one[0].owner, followed()) for one in changed):
            of_calls: Counter[int] = Counter()
            if not attended:
                gc.collect()
                of_calls = _held_by_calls()
            del changed
            self._drop_own(of_calls)
            changed = [one for one in self._first.values() if one[1] is not None and one[0].now() != one[1]]
        known = followed() if changed else ()
        changed = [one for one in changed if not _is_one_of(one[0].owner, known)]
        changed = [one for one in changed if not isinstance(one[0].owner, functools._lru_cache_wrapper)]
        staying = self._staying([location for location, _, _ in changed])
        whole = {id(location.owner) for location, _, _ in changed if isinstance(location, Contents)}
        streams = {id(location.owner) for location, _, _ in changed if isinstance(location, Stream)}
        made = [(location, kept) for location, _, kept in changed if location.key not in staying]
        for location, _, kept in changed:
            if location.key in staying:
                self._kept_changes[location.key] = (location, kept)
                self._guards.discard(location.key)
        again = [_redo(location, whole, streams) if attended else None for location, _ in made]
        for location, kept in reversed(made):  # what was met first is as it was met at last
            location.restore(kept)
        changes = [replace(self._change(location), redo=redo) for (location, _), redo in zip(made, again, strict=True)]
        opaque = [location for location, _, _ in self._first.values() if isinstance(location, Opaque)]
        changes += [Change(f"changes {location.text}") for location in opaque]
        found = [location for key, (location, _, _) in self._first.items() if key in self._guards]
        for one in found:
            one.foreign = self._foreign(one)
            if isinstance(one, Contents) and (name := self._name(one)):
                one.text = f"the contents of {name}"
        self._first.clear()
        return found, changes

    def now(self) -> dict[Key, Hashable]:
        """How the places look now that were found by a name, rather than in an object that the step made."""
        found = [location for location, before, _ in self._first.values() if before is not None and self._is_found(location)]
        return {location.key: location.now() for location in found}

    def changed(self, since: Mapping[Key, Hashable]) -> Change | None:
        """The first change since :meth:`now` gave this, but of caches; a place that was met since has been as it was met."""
        for key, now in self.now().items():
            location, before, _ = self._first[key]
            if now != since.get(key, before) and not isinstance(location.owner, functools._lru_cache_wrapper):
                return self._change(location)
        return None

    def _is_found(self, location: Location) -> bool:
        """Whether a name of a function's surroundings leads to a place."""
        met: set[int] = set()
        while not is_variable(location) and id(location.owner) not in met:
            met.add(id(location.owner))
            above = self._first.get(self._leads.get(id(self._owner(location)), ("", 0, None)), (None,))[0]
            if above is None:
                return False
            location = above
        return is_variable(location)

    def _change(self, location: Location) -> Change:
        if isinstance(location, Stream):
            return Change(use_of(location.owner, location.text), advice=_OF_STREAMS)
        if is_variable(location):
            return Change(f"assigns {location.text}")
        if not isinstance(location, Contents | Entry | Item):
            return Change(f"changes {location.text}")
        name, value = self._followed_from(location)
        contents = f"the contents of {name}" if name else location.text
        return Change(f"changes {contents}", name or location.text, value)

    def _followed_from(self, location: Location) -> tuple[str, Any]:
        """The name that leads to a place, and the object nearest to it of those whose changes can be recorded."""
        name, found, met = "", None, set()
        owner = self._owner(location)
        while id(owner) not in met:
            met.add(id(owner))
            above = self._first.get(self._leads.get(id(owner), ("", 0, None)), (None,))[0]
            name = name if above is None else above.text
            if may_be_followed(owner) and not isinstance(owner, _NOT_FOLLOWED) and not is_library(type(owner).__module__):
                found = owner
            if above is None or is_variable(above):
                break
            owner = self._owner(above)
        return name, found

    def _owner(self, location: Location) -> Any:
        """The object whose attributes a dict has, or the owner of the place itself."""
        of, _ = self._objects.get(id(location.owner), (0, None))
        above = self._first.get(self._leads.get(of, ("", 0, None)), (None,))[0]
        if above is None:
            return location.owner
        held = inside(above.owner) if isinstance(above, Contents) else [above.value()]
        return next((one for one in held if id(one) == of), location.owner)

    def _name(self, location: Location) -> str:
        """The name of a variable or attribute that leads to an object; "" where none is known."""
        met: set[int] = set()
        while id(location.owner) not in met:
            met.add(id(location.owner))
            above = self._first.get(self._leads.get(id(location.owner), ("", 0, None)), (None,))[0]
            if above is None:
                break
            if not isinstance(above, Contents):
                return above.text
            location = above
        return ""

    def _foreign(self, location: Location) -> type | None:
        _, kind = self._objects.get(id(location.owner), (0, type(location.owner)))
        return kind if is_third_party(kind.__module__) or location.key in self._of_libraries else None

    def _staying(self, changed: Collection[Location]) -> set[Key]:
        """The changes that stay: the first of a place that only code of an installed package knows, as of a cache.

        None of our objects, as the Trainer, which a library's module may change before an exception passes on. None where a
        function of the user's is in such places and nowhere else: the step has made it, and registered it. Nor where a value of
        the running step is in what it keeps, which no other run may meet.
        """
        found = {
            one.key: [one.value()] if isinstance(one, Entry | Item | Variable) else list(inside(one.owner))
            for one in changed
            if one.key in self._of_libraries and one.key not in self._kept_changes and not self._is_ours(one)
        }
        held = Counter(id(one) for values in found.values() for one in values)
        return {
            key
            for key, values in found.items()
            if not any(_is_users(one) and _holders(one) <= 2 * held[id(one)] for one in values)
            and not _holds_of_the_step(values, else_many=False)
        }

    def _is_ours(self, location: Location) -> bool:
        """Whether a place is in an object of ours, as the Trainer is, or in a container that is an attribute of one."""
        above = self._first.get(self._leads.get(id(location.owner), ("", 0, None)), (location,))[0]
        owners = (location.owner, above.owner)
        kinds = (self._objects.get(id(one), (0, type(one)))[1] for one in owners)
        return any(is_house(kind.__module__) for kind in kinds)

    def _drop_own(self, of_calls: Counter[int] | None = None) -> None:
        """Forget objects that nobody else holds: the step has made them, and no other step can meet them.

        Args:
            of_calls: see :func:`_held_by_calls`.
        """
        while True:
            own: Counter[int] = Counter(of_calls)
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


def _is_one_of(owner: Any, known: Collection[int]) -> bool:
    """Whether an object, or the dict of its attributes where it has nothing else, has one of these ids."""
    if id(owner) in known:
        return True
    return not has_contents(type(owner)) and (held := attributes_of(owner)) is not None and id(held) in known


def _put_back_tensor(location: Location, kept: Any) -> None:
    """Put the tensor that was at a place there again where the step has left what stands for it: ``t += 1`` assigns, too."""
    if isinstance(location, Attribute | Entry | Lookup | Variable):
        before, now = kept, location.keep()
        if isinstance(location, Lookup) and kept is not None and now is not None:
            before, now = kept[1], now[1]
        if is_still(before, now):
            location.restore(kept)


def _redo(location: Location, whole: Collection[int], streams: Collection[int]) -> Callable[[], None] | None:
    """Puts what is at a place now there once more; None where that cannot be.

    Args:
        whole: ids of the objects of which all contents are put there.
        streams: ids of the generators and files that are.
    """
    if isinstance(location, Item | Member) and id(location.owner) in whole:
        return _nothing
    after = location.keep()
    if not isinstance(location, _PUT) or (isinstance(location, Entry) and not isinstance(location.owner, dict)):
        return None
    if isinstance(location, Stream) and type(after) is int:  # a file on disk
        return None
    if isinstance(location, Attribute | Variable) and after is MISSING:
        return None
    if type(location) is Contents and after[0] is None and not any(after[1:]):  # a mapping proxy's are another object's
        return _nothing if id(location.owner) in streams else None
    return None if _holds_of_the_step(after) else functools.partial(location.restore, after)


def _nothing() -> None: ...


_PUT = (Attribute, Contents, Entry, Kind, Lookup, Stream, Values, Variable)
_MOST = 2000  # objects in what is put


def _holds_of_the_step(value: Any, *, else_many: bool = True) -> bool:
    """Whether a value of the running step is in it.

    Args:
        else_many: the answer where it has too many entries to look.
    """
    todo, met = [value], {}
    while todo:
        one = todo.pop()
        if stands_in(one):  # some of these are numbers
            return True
        if len(met) == _MOST:
            return else_many
        if id(one) in met or isinstance(one, PLAIN):
            continue
        met[id(one)] = one
        if isinstance(one, torch.Tensor | type | types.ModuleType | torch.nn.Module | torch.optim.Optimizer):
            continue
        if is_house(type(one).__module__):  # a Trainer, whose members answer for the run; a look may be a read
            continue
        todo += inside(one)
        if isinstance(one, types.FunctionType):
            todo += [cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType()]
        elif isinstance(one, types.MethodType):
            todo.append(one.__self__)
    return False


def is_of_the_host(value: Any) -> bool:
    """Whether neither a value of the running step nor a tensor is in it, nor what may hold one that cannot be looked at."""
    todo, met = [value], {}
    while todo:
        one = todo.pop()
        if id(one) in met or isinstance(one, PLAIN):
            continue
        met[id(one)] = one
        if len(met) > _MOST or stands_in(one) or isinstance(one, (torch.Tensor, types.FunctionType, *_NOT_FOLLOWED)):
            return False
        if not isinstance(one, type):
            todo += inside(one)
    return True


def _is_users(value: Any) -> bool:
    return type(value) is types.FunctionType and is_noted(value)


def _holders(value: Any) -> int:
    """How many hold an object besides those that ask."""
    return sys.getrefcount(value) - 3


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
    if isinstance(location, Entry | Variable):
        yield kept
    for one in kept if isinstance(location, Contents) else ():
        if isinstance(one, dict):
            yield from one.values()
        elif isinstance(one, tuple | list | set | deque):
            yield from one


def _held_by_calls() -> Counter[int]:
    """By id: how often objects are in the contexts of calls of autograd Functions, and in what these alone hold.

    The graph of a run is there as long as its results are, with all that a Function was given and has kept for its backward.
    """
    held: Counter[int] = Counter()
    # The list of all objects is held by nobody: what holds it would be in it.
    inside: list[Any] = [vars(one) for one in gc.get_objects() if issubclass(type(one), torch.autograd.function.FunctionCtx)]
    while inside:
        holder = inside.pop()
        for key in holder if type(holder) is dict else range(len(holder)):
            held[id(holder[key])] += 1
            if type(holder[key]) in (dict, list, tuple) and sys.getrefcount(holder[key]) == 2:  # by it, and by the question
                inside.append(holder[key])
    return held


def _standard_streams() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__


def stands_in(value: Any) -> bool:
    """Whether a value is there only while a step is captured: a traced value, or what records the calls of a function."""
    return type(value) in OF_THE_STEP or (not isinstance(value, PLAIN) and is_for_a_time(value))
