"""Guards on attributes: the attributes of modules, callbacks and the datamodule that a captured step assumed.

A capture notes which attributes it reads. Afterwards an assignment to an attribute of a module is noted too; values of attributes
that were both read and assigned are part of what selects a variant. What can change without an assignment (containers, plain
objects, attributes of callbacks) is compared before every step, mostly by identity. Other attributes cost nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_compat.step.effects.recorder import note_written
from torch_compat.step.effects.snapshots import CACHES_OF_PARAMETERS
from torch_compat.step.guards import module_structure
from torch_compat.step.guards.compared_places import Locations
from torch_compat.step.guards.fingerprints import Fingerprint, contents_of, fingerprint
from torch_compat.step.guards.locations import Entry
from torch_compat.step.guards.one_shot_objects import holds_consumed, is_iterator, refuse, runs_no_code
from torch_compat.step.guards.pulled_places import PulledPlace, given
from torch_compat.step.host.draws import GENERATORS, DrawRecorder
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.metrics.calls import metric_modules
from torch_compat.step.values.marks import PLAIN
from torch_compat.step.values.names import MISSING
from xlatrain.bridge.patches import patched
from xlatrain.cluster.distributed import world

_NOT_STATE = frozenset(
    {
        "_current_fx_name",
        "_metric_attributes",
        "_param_requires_grad_state",
        "_trainer",
        "_fabric",
        "_kept_steps",
        "trainer",
        "__dict__",
        "__class__",
    }
)
_NUMBERS = (int, float)

Where = tuple[str, str]
"""Owner (the path of a module, or the name of another root) and attribute."""


class AttributeGuards:
    """The guards on attributes of a module tree, and of other objects, during a run.

    Args:
        module: the root of the tree.
        others: name → further object whose attributes steps may read (callbacks, datamodule).
    """

    def __init__(self, module: torch.nn.Module, others: Mapping[str, Any] | None = None) -> None:
        self._module = module
        self._others = dict(others or {})
        self.find_owners()
        self._assigned: set[Where] = set()
        self._reads: dict[str, set[Where]] = {}
        self._rewritten: dict[str, set[Where]] = {}
        self._watched: dict[str, dict[Where, Fingerprint]] = {}
        self._held: dict[str, _Held] = {}
        self._of_earlier_run: set[str] = set()  # steps whose reads were held in an earlier run, and not compared in this one
        self._carried: dict[str, set[Where]] = {}  # tensors in which are inputs
        self._keys: dict[str, tuple[int, int]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._written_in_capture: set[Where] | None = None
        self._reads_in_capture: set[Where] = set()
        self._changes = 0
        self._inputs: dict[str, dict[Where, str]] = {}
        self._exact: dict[str, set[Where]] = {}
        # Inputs of every step that reads them: another value of the type changes no key. None while it is no number.
        self._free: dict[Where, type | None] = {}
        self._kinds: dict[Where, type] = {}  # of all inputs, as they were seen last
        self._tracer: ScalarTracer | None = None
        self._draws: DrawRecorder | None = None

    def find_owners(self) -> None:
        """Look which modules are in the tree."""
        metrics = metric_modules(self._module)
        self._owners: dict[str, Any] = dict(self._module.named_modules())
        self._metrics = {name for name, child in self._owners.items() if id(child) in metrics}
        self._index = {id(child): name for name, child in self._owners.items()}
        self._others = {name: owner for name, owner in self._others.items() if id(owner) not in self._index}
        self._owners.update(self._others)
        self._index.update({id(owner): name for name, owner in self._others.items()})

    def follow(self, name: str, owner: Any) -> None:
        """Steps change an object outside of the tree: its attributes are followed from now on."""
        if not isinstance(owner, dict | list | set | deque):
            self._others[name] = owner
            self.find_owners()

    def forget(self, step: str) -> None:
        """Let go of what is known of a step that is no more."""
        known = (self._reads, self._rewritten, self._watched, self._held, self._keys, self._inputs, self._exact, self._carried)
        for by_step in known:
            by_step.pop(step, None)
        self._of_earlier_run.discard(step)
        self._changed_inputs()

    def watched(self, step: str) -> set[int]:
        """The ids of the containers in attributes that are compared here for ``step``."""
        return {id(holder) for one in self._watched.get(step, {}).values() for holder, _ in one.entries}

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Note assignments to attributes of the tree in the block, and changes of its structure."""
        _FOLLOWERS.add(self)
        if torch.nn.Module.__setattr__ is not _setattr_and_tell:
            torch.nn.Module.__setattr__ = _setattr_and_tell  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with module_structure.following():
                yield
        finally:
            _FOLLOWERS.discard(self)
            if not _FOLLOWERS:
                torch.nn.Module.__setattr__ = _SETATTR

    def note_assigned(self, module: torch.nn.Module, name: str) -> None:
        """An attribute of some module was assigned."""
        path = self._index.get(id(module))
        if path is None or name in _NOT_STATE or name not in module.__dict__:
            return
        if path in self._metrics and not any((path, name) in reads for reads in self._reads.values()):
            return  # a state, which every update assigns and no step can read
        if self._written_in_capture is not None:
            self._written_in_capture.add((path, name))
            if name != "training" and (path, name) not in self._reads_in_capture:
                note_written(module, name)  # an attribute that the step has read is guarded by its value
        else:
            self._note_set((path, name))

    def _note_set(self, where: Where) -> None:
        """An attribute was set or deleted: another key, unless it is an input and still a number of the same type."""
        kind = type(self._value(where))
        if where in self._kinds:
            self._kinds[where] = kind
        if self._free.get(where) is kind:
            return
        if where in self._free:
            self._free[where] = kind if kind in _NUMBERS else None
        self._assigned.add(where)
        self._changes += 1

    def rescan(self) -> None:
        """Find what was changed in a dict of modules or of hooks."""
        module_structure.note_change()

    def reads_of(self, step: str, owners: Collection[str]) -> bool:
        """Whether ``step`` reads attributes of an owner with one of these names."""
        return any(owner in owners for owner, _ in self._reads.get(step, ()))

    def end_run(self, leaving: Collection[str]) -> None:
        """Let go of the owners with these names."""
        self._others = {name: owner for name, owner in self._others.items() if name not in leaving}
        self.find_owners()

    def begin_run(self, others: Mapping[str, Any]) -> None:
        """Find all that was changed since the last run: assignments were not followed. ``others`` as for the guards.

        What a step reads is compared before its first run, when modules are in the mode that it runs in.
        """
        self._others = {**others, **self._others, **others}
        self.find_owners()
        self.rescan()
        self._of_earlier_run = set(self._held)
        for step in self._reads:
            self._watch(step)
            if step not in self._held:
                self._hold(step)
        self._changed_inputs()

    def refresh(self, step: str) -> None:
        """Find what ``step`` reads and was changed without an assignment that is followed; cheap where nothing was."""
        for where in self._inputs.get(step, ()):
            if type(self._value(where)) is not self._kinds[where]:  # it was deleted, or put into ``__dict__``
                self._note_set(where)
        held = self._held.get(step)
        if held is None:
            return
        if step in self._of_earlier_run:
            self._of_earlier_run.remove(step)
            changed = not self._still_holds(step, held)
        else:
            changed = held.places.changed()
        if changed:
            self._note_changed(held)
            self._hold(step)

    def _still_holds(self, step: str, held: _Held) -> bool:
        """Whether what ``step`` reads is as it was held, in the same objects: what is known of it can stay."""
        if held.where != self._where(step):
            return False
        owners = (self._owners[owner].__dict__ for owner, _ in held.where)
        return all(owner is place.owner for owner, (place, _) in zip(owners, held.places.marks, strict=True)) and (
            not held.places.changed()
        )

    def _note_changed(self, held: _Held) -> None:
        """Note what is otherwise where it was held, also since the owner of this name is another object by now."""
        befores = (before for _, before in held.places.marks)
        changed = {where for where, before in zip(held.where, befores, strict=True) if self._place(where).now() != before}
        if changed:
            self._assigned |= changed
            self._changes += 1

    def _hold(self, step: str) -> None:
        """Remember the attributes that ``step`` reads, but for those whose values are inputs."""
        where = self._where(step)
        self._held[step] = _Held(where, Locations(map(self._place, where)))

    def _where(self, step: str) -> list[Where]:
        inputs = {where for where in self._inputs.get(step, ()) if where[0] not in self._others}  # else their type may change
        read = self._reads.get(step, set()) - self._carried.get(step, set()) - inputs
        return [one for one in read if one[0] in self._owners and one[1] not in _MODULE_INTERNALS]

    def _place(self, where: Where) -> Entry:
        owner = self._owners.get(where[0])
        return Entry({} if owner is None else owner.__dict__, where[1], where[1])

    @contextlib.contextmanager
    def capturing(self, step: str) -> Iterator[None]:
        """Count attributes that are read in the block (before the step itself writes them) as read by ``step``."""
        reads = self._reads_in_capture = self._reads.setdefault(step, set())
        index = self._index
        written = self._written_in_capture = set()

        def noting(original: Any) -> Any:
            def read_and_note(owner: Any, name: str) -> Any:
                path = None if name in _NOT_STATE else index.get(id(owner))
                try:
                    value = original(owner, name)
                except AttributeError:
                    if path is not None and (path, name) not in written and path not in self._metrics:
                        reads.add((path, name))  # an attribute that is missing now may be there another time
                    raise
                if path is None:
                    return value
                where = (path, name)
                if where not in written and self._decides(path, name, value):
                    reads.add(where)
                    if self._tracer is not None:
                        return self._seen_by(step, where, value)
                return value

            return read_and_note

        try:
            with patched([(kind, "__getattribute__", noting(kind.__getattribute__)) for kind in self._owners_kinds()]):
                yield
        finally:
            self._written_in_capture = None
            self._watch(step)
            self._hold(step)
            self._changed_inputs()

    def _owners_kinds(self) -> list[type]:
        """The classes whose reads are noted, none of which inherits another: those of the owners, and no class of all modules,
        each of whose thousands of subclasses Python would look at. A metric's class is replaced by others meanwhile.
        """
        kinds = {torch.nn.Module if name in self._metrics else type(owner) for name, owner in self._owners.items()}
        return [kind for kind in kinds if kinds.isdisjoint(kind.__mro__[1:])]

    def _decides(self, path: str, name: str, value: Any) -> bool:
        """Whether what a step read may decide about it. Of metrics only settings: their states are for themselves."""
        return path not in self._metrics or (not name.startswith("_") and isinstance(value, PLAIN))

    @contextlib.contextmanager
    def reading(self, tracer: ScalarTracer, host_values: HostValues) -> Iterator[None]:
        """Let numbers that the host changes, and numbers drawn at random, be inputs while the user's Python is captured."""
        with DrawRecorder(tracer, host_values).recording() as self._draws:
            self._tracer = tracer
            try:
                yield
            finally:
                self._tracer = self._draws = None

    def _seen_by(self, step: str, where: Where, value: Any) -> Any:
        """The value that the step being captured gets for an attribute."""
        assert self._tracer is not None and self._draws is not None
        if type(value) in _NUMBERS and where in self._inputs.get(step, ()):
            return self._tracer.counter(self._text(where))
        if is_iterator(value) and where[0] not in self._others and world().process_count == 1 and not runs_no_code(value):
            return given(PulledPlace(where, 0, self._owners[where[0]]), self._draws.has_drawn)
        if holds_consumed(value):
            refuse(self._text(where))
        if isinstance(value, GENERATORS):
            return self._draws.stand_in(value, self._text(where))
        return value

    def promote(self, step: str) -> None:
        """Numbers that ``step`` reads and the host has changed become its inputs, instead of guards on their values."""
        known, exact = self._inputs.setdefault(step, {}), self._exact.get(step, set())
        for where in (self._reads.get(step, set()) & self._assigned) - exact - known.keys():
            if type(self._value(where)) in _NUMBERS:
                known[where] = self._text(where)
        self._changed_inputs()

    def demote(self, step: str) -> bool:
        """The inputs of ``step`` are guards on their values from now on; False if there are none."""
        found = self._inputs.pop(step, {})
        self._exact.setdefault(step, set()).update(found)
        self._changed_inputs()
        return bool(found)

    def _changed_inputs(self) -> None:
        """Reads or inputs of a step have changed."""
        self._changes += 1
        self._kinds = {where: type(self._value(where)) for where in self._all_inputs()}
        reading = {where: [step for step, reads in self._reads.items() if where in reads] for where in self._all_inputs()}
        self._free = {
            where: kind if (kind := type(self._value(where))) in _NUMBERS else None
            for where, steps in reading.items()
            if all(where in self._inputs.get(step, ()) for step in steps)
        }

    def _all_inputs(self) -> set[Where]:
        return {where for inputs in self._inputs.values() for where in inputs}

    def fill(self, step: str, numbers: dict[str, Any]) -> None:
        """Put the values of the attributes that are inputs of ``step`` among its numbers."""
        inputs = self._inputs.get(step)
        if inputs:
            for where, text in inputs.items():
                numbers[text] = self._value(where)

    def note_rewritten(self, step: str, where: Collection[Where]) -> None:
        """Note that ``step`` itself changes these attributes or their contents."""
        self._rewritten.setdefault(step, set()).update(where)
        self._watch(step)

    def reads_before(self, step: str, where: Collection[Where]) -> list[str]:
        """The attributes among ``where`` that ``step`` reads before it assigns them, as a user writes them."""
        inputs = self._inputs.get(step, {}).keys() | self._carried.get(step, set())
        return sorted(map(self._text, self._reads.get(step, set()).intersection(where) - inputs))

    def carry(self, step: str, where: Where) -> None:
        """The tensor in an attribute is an input of ``step`` from now on."""
        self._carried.setdefault(step, set()).add(where)
        self._changes += 1

    def name_of(self, step: str, tensor: torch.Tensor) -> str | None:
        """The attribute, as a user writes it, in which ``step`` finds a tensor; None if it finds it elsewhere."""
        return next((self._text(where) for where in self._reads.get(step, ()) if self._value(where) is tensor), None)

    def holds_constant(self, step: str, constants: Collection[torch.Tensor]) -> str | None:
        """The attribute, as a user writes it, that ``step`` rewrites although it computes with the tensor in it."""
        identities = {id(tensor) for tensor in constants}
        for owner, name in sorted(self._rewritten.get(step, ())):
            if id(self._value((owner, name))) in identities:
                return self._text((owner, name))
        return None

    def note_replayed(self, where: Collection[Where]) -> None:
        """A step's side effects on these attributes were carried out."""
        for one in where:
            if any(one in reads for reads in self._reads.values()):
                self._note_set(one)

    def key(self, step: str) -> int:
        """The number of the present values of all that ``step`` reads and the host may have changed during the run."""
        watched = self._watched.get(step)
        if watched:
            for one in watched.values():
                if one.changed():
                    self._watch(step)
                    self._changes += 1
                    break
        cached = self._keys.get(step)
        if cached is not None and cached[0] == self._changes:
            return cached[1]
        watched = self._watched.get(step, {})
        assigned = (self._reads.get(step, set()) & self._assigned) - self._carried.get(step, set())
        values = tuple((where, self._part(step, where, tensors=where in watched)) for where in sorted(assigned | watched.keys()))
        number = self._numbers.setdefault(values, len(self._numbers))
        self._keys[step] = (self._changes, number)
        return number

    def facts(self, step: str) -> dict[str, str]:
        """The facts behind :meth:`key`, for people: an attribute as a user writes it → its value."""
        found = (self._reads.get(step, set()) & self._assigned) | self._watched.get(step, {}).keys()
        held = {where: self._value(where) for where in sorted(found - self._inputs.get(step, {}).keys())}
        return {self._text(where): "absent" if value is MISSING else repr(value)[:60] for where, value in held.items()}

    def _part(self, step: str, where: Where, *, tensors: bool) -> Hashable:
        value = self._value(where)
        if type(value) in _NUMBERS and where in self._inputs.get(step, ()):
            return ("input", type(value).__name__)
        return fingerprint(value, tensors=tensors)

    def _value(self, where: Where) -> Any:
        owner = self._owners.get(where[0])  # None: of a module that is no longer there
        return MISSING if owner is None else owner.__dict__.get(where[1], MISSING)

    def _text(self, where: Where) -> str:
        """The attribute as a user writes it."""
        owner, name = where
        return f"{owner}.{name}" if owner in self._others else f"self.{owner + '.' if owner else ''}{name}"

    def _watch(self, step: str) -> None:
        """Remember how everything looks that ``step`` reads and that changes without an assignment to a module's attribute."""
        watched: dict[Where, Fingerprint] = {}
        rewritten = self._rewritten.get(step, set())
        for owner, name in self._reads.get(step, set()) - rewritten:
            value = self._value((owner, name))
            if name not in _MODULE_INTERNALS and contents_of(value) is not None and not is_iterator(value):
                watched[owner, name] = Fingerprint.of(value)
        self._watched[step] = watched


_SETATTR = torch.nn.Module.__setattr__
_FOLLOWERS: weakref.WeakSet[AttributeGuards] = weakref.WeakSet()  # weak: a Fabric's run has no end but that of its objects


def _setattr_and_tell(module: torch.nn.Module, name: str, value: Any) -> None:
    if isinstance(value, torch.nn.Module) or name in module.__dict__.get("_modules", ()):
        module_structure.note_change()
    _SETATTR(module, name, value)
    for guards in tuple(_FOLLOWERS):
        guards.note_assigned(module, name)


_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"} | {"_hparams_initial"} | CACHES_OF_PARAMETERS


class _Held(NamedTuple):
    """The attributes that a step has read, as places.

    Attributes:
        where: they are.
        places: the same.
    """

    where: list[Where]
    places: Locations
