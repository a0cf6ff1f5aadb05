"""Finds what a captured step changed in Python objects, by comparison, and takes it back."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.effects.effects import Effects, ObjectPath, Record, is_plain
from torch_compat.step.effects.made_objects import MadeObjects, keeps_of_step
from torch_compat.step.effects.snapshots import (
    CACHES_OF_PARAMETERS,
    FROM_THE_STEP,
    Found,
    OfArray,
    OfAttributes,
    OfBuffers,
    OfContents,
    OfHooks,
    OfStream,
    OfTensors,
    Snapshot,
    attributes_to_follow,
    exact_key,
    snapshot_of,
)
from torch_compat.step.host.calls import HostCalls, is_size, is_traced
from torch_compat.step.host.slots import BatchSlot, ObjectSlot, Places
from torch_compat.step.values import policy
from torch_compat.step.values.generators import state_of
from torch_compat.step.values.marks import look, slots
from torch_compat.step.values.user_objects import attributes_of, is_user_class, is_user_object
from torch_compat.utilities.metric_types import is_metric_or_collection
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows
from xlatrain.bridge.errors import CaptureError

_NOTHING_INSIDE = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), types.FunctionType, types.MethodType)
_IN_ATTRIBUTES = (torch.nn.Module, *_NOTHING_INSIDE)  # modules are walked as such


class EffectRecorder:
    """Records what captured steps change in the objects reachable from ``roots`` (name → object)."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = dict(roots)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record changes in the block; on leaving, all are taken back, and the recording knows what they were."""
        recording = Recording(self.roots)
        _OPEN.append(recording)
        try:
            yield recording
        finally:
            _OPEN.remove(recording)
            recording.finish()


def followed(roots: Mapping[str, Any]) -> set[int]:
    """The ids of all containers and arrays, and of the ``__dict__`` of all objects, whose changes are recorded."""
    seen = [one for one in Recording(roots).snapshots if isinstance(one, OfContents | OfArray)]
    return {id(one.holder.__dict__ if isinstance(one, OfAttributes) else one.holder) for one in seen}


_OPEN: list[Recording] = []


def note_written(owner: torch.nn.Module, name: str) -> None:
    """Tell the recordings that the step assigns an attribute which it has not read."""
    for recording in _OPEN:
        recording.note_written(owner, name)


def changed_so_far() -> set[int]:
    """The ids of the objects that the step being captured has changed so far; of a module also where it has written a tensor."""
    return {id(one.holder) for recording in _OPEN for one in recording.snapshots if one.is_written()}


@contextlib.contextmanager
def changing_nothing(refusal: Callable[[str], CaptureError]) -> Iterator[None]:
    """A part of a step that is being recorded, which may not change the objects that are followed, nor call on the host.

    Raises:
        CaptureError: ``refusal`` of what it does.
    """
    outer = _OPEN[-1]
    before, calls = Recording(outer.roots), len(outer.calls.calls)
    yield
    if len(outer.calls.calls) > calls:
        raise refusal(f"calls {outer.calls.calls[calls].text} on the host")
    if (changed := next((one for one in before.snapshots if one.is_changed()), None)) is not None:
        raise refusal(changed.does)


@dataclass
class Recording:
    """The state of the objects before one capture, and afterwards the changes.

    Attributes:
        calls: those that the step makes on the host.
        of_batch: by id of a container of the batch: its slot.
        snapshots: the objects.
    """

    roots: Mapping[str, Any]
    calls: HostCalls = field(default_factory=HostCalls)
    of_batch: Mapping[int, BatchSlot] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    _found: Found = field(default_factory=Found)
    _stored_again: list[ObjectPath] = field(default_factory=list)
    _of_library: set[ObjectPath] = field(default_factory=set)
    _packages: set[str] = field(default_factory=set)
    _made: MadeObjects = field(init=False)

    def __post_init__(self) -> None:
        modules = [one for root in self.roots.values() if isinstance(root, torch.nn.Module) for one in root.modules()]
        self._packages = {type(one).__module__.partition(".")[0] for one in modules} - policy.INFRASTRUCTURE
        for name, root in self.roots.items():
            self._see(ObjectPath(name), root, self.there_before, 0)
        self._made = MadeObjects(self.there_before)

    @property
    def there_before(self) -> set[int]:
        """The ids of the containers and objects that were found."""
        return self._found.there_before

    def note_written(self, owner: torch.nn.Module, name: str) -> None:
        """The step assigns an attribute that it has not read: a change, even if it happens to have that value already."""
        self._found.written.add((id(owner), name))

    def _see(self, place: ObjectPath, value: Any, known: set[int], depth: int) -> None:
        if id(value) in known or depth > policy.DEPTH_OF_STATE or is_metric_or_collection(value):
            return
        if isinstance(value, list | deque | dict | set):
            known.add(id(value))
            self.snapshots.append(snapshot_of(place, value))
            if isinstance(value, dict):
                for key, item in list(value.items()):
                    if not isinstance(item, _NOTHING_INSIDE):  # a vocabulary has many
                        self._see(place.then("item", key), item, known, depth + 1)
            elif not isinstance(value, set):
                self._see_entries(place, value, known, depth)
            if is_user_object(value):  # of a class of the user's, which has attributes besides
                self._see_object(place, value, known, depth)
        elif isinstance(value, tuple):
            self._see_entries(place, value, known, depth)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= policy.BYTES_OF_STATE:
                self.snapshots.append(OfArray(place, value, value.copy()))
        elif (stream := state_of(value)) is not None:
            known.add(id(value))
            self.snapshots.append(OfStream(place, value, stream))
        elif isinstance(value, torch.nn.Module) or depth == 0 or is_user_object(value):
            self._see_object(place, value, known, depth)
        elif type(value).__module__.partition(".")[0] in self._packages and attributes_of(value) is not None:
            self._of_library.add(place)
            self._see_object(place, value, known, depth)

    def _see_entries(self, place: ObjectPath, value: Sequence[Any], known: set[int], depth: int) -> None:
        last = -1 if isinstance(value, tuple) else len(value) - 1  # which in a list may be another once it is longer
        for index, item in enumerate(value if len(value) <= policy.MOST else ()):
            if not isinstance(item, _NOTHING_INSIDE):
                self._see(place.then("item", -1 if index == last else index), item, known, depth + 1)

    def _see_object(self, place: ObjectPath, value: Any, known: set[int], depth: int) -> None:
        known.add(id(value))
        held = attributes_to_follow(value)
        self.snapshots.append(OfAttributes(place, value, held))
        for key, item in held.items():
            if not isinstance(item, _IN_ATTRIBUTES):
                self._see(place.then("attr", key), item, known, depth + 1)
        if isinstance(value, torch.nn.Module):
            self.snapshots += [OfBuffers(place, value), OfHooks(place, value), OfTensors(place, value)]
            self._see(place.then("attr", "_non_persistent_buffers_set"), value._non_persistent_buffers_set, known, depth + 1)
            for key, child in value._modules.items():
                if child is not None and not is_metric_or_collection(child):  # theirs are host calls
                    self._see(place.then("attr", "_modules").then("item", key), child, known, 0)

    def finish(self) -> None:
        """Find what changed and take it back."""
        for one in sorted(self.snapshots, key=lambda one: one.ORDER):
            one.take_back(self._found)
        self._found.changes = [change for change in self._found.changes if not _is_in_cache(*change[1:3])]

    def refuse_made(self, tree: Any, where: str) -> None:
        """Raises:
        CaptureError: the step keeps or gives away a module that it has made, whose tensors have no values.
        """
        if (made := next(filter(self._found.is_made, pytree.tree_leaves(tree)), None)) is not None:
            raise CaptureError(
                f"the step makes a {type(made).__qualname__} and keeps it in {where}, whose tensors a compiled step would make "
                "only once. Make it in __init__ or configure_model, where its parameters get an optimizer too"
            )

    def kept(self) -> list[Any]:
        """The values that the step has stored."""
        return [value for _, _, _, value in self._found.changes]

    def effects(self, template: Callable[[Any], Any], places: Places | None = None) -> Effects:
        """The changes, with the tensors of this capture made outputs of the step by ``template``.

        Args:
            places: of containers that are at several.

        Raises:
            CaptureError: a change keeps a tensor of an earlier step, which a record cannot stand for; or the step leaves a hook
                on a module.
        """
        found = self._found
        if problem := found.problems.get("hook") or found.problems.get("tensor"):
            raise CaptureError(problem)
        refusal = next((found.problems[kind] for kind in ("stream", "order", "array") if kind in found.problems), "")
        tied = (places or Places()).tied
        records = tuple(self._record(*change, template, tied) for change in found.changes)
        if self._stored_again:
            refusal = (
                f"the step stores or returns {self._stored_again[0]}, a list, dict or set that is there already; a compiled step "
                "would make another. Take a copy of it, or do it in a hook such as on_train_batch_start"
            )
        return Effects(records, () if found.once else tuple(found.left), refusal, only_once=found.once)

    def _record(
        self,
        kind: str,
        place: ObjectPath,
        key: Any,
        value: Any,
        template: Callable[[Any], Any],
        tied: Callable[[Any, Any], Any],
    ) -> Record:
        made = (place, key) in self._found.made
        if any(map(_is_of_the_step, key if type(key) is tuple else (key,))):
            raise CaptureError(
                f"the step makes an entry of {place} under a key that is a value of its own batch, which a compiled step "
                "does not know beforehand. Keep a list of pairs, or make the entry in a hook such as on_train_batch_end"
            )
        own = value
        value = self.made_anew(self.with_objects(value))
        value = pytree.tree_map_only((set, frozenset), functools.partial(_known_set, place), value, is_leaf=is_size)
        filled = self._template(place, key, value, template)
        if kind != "contents":
            filled = tied(own, filled)
        elif isinstance(filled, list):  # of a list that is there, what is in it alone is new
            filled = list(map(tied, own, filled))
        owner = next(
            (one for one in self._of_library if place.root == one.root and place.steps[: len(one.steps)] == one.steps), None
        )
        if owner is None:
            return Record(kind, place, key, filled, made)
        if owner != place or kind != "setattr" or not (is_plain(value) or issubclass(type(value), torch.Tensor)):
            raise CaptureError(
                f"the step changes {place}{'' if key is None else f' ({key!r})'}, in an object of the library's whose reads are "
                "not followed: a compiled step would change it only once"
            )
        before = next(one.held.get(key) for one in self._contents() if one.place == place)
        return Record("setcache", place, key, filled, made, look(before))

    def made_anew(self, tree: Any) -> Any:
        """``tree``, which outlives the capture, with what is recorded of objects in it that the step has made."""
        return self._made.recorded(tree)

    def with_objects(self, tree: Any) -> Any:
        """``tree``, which outlives the capture, with slots for containers that were there before, in the batch as well: a copy
        would be another one."""
        there, of_batch = self.there_before, self.of_batch

        def is_there(one: Any) -> bool:
            # torch's flatten leaves a cycle that holds this function: with the recording in it, objects that the user
            # drops would be there until garbage is collected, and the user's weak references say so
            return id(one) in of_batch or (isinstance(one, list | dict | deque | set) and id(one) in there)

        leaves, structure = pytree.tree_flatten(tree, is_leaf=lambda one: is_size(one) or is_there(one))
        return pytree.tree_unflatten([self._slot_of(leaf) if is_there(leaf) else leaf for leaf in leaves], structure)

    def _contents(self) -> Iterator[OfContents]:
        return (one for one in self.snapshots if isinstance(one, OfContents))

    def _slot_of(self, value: Any) -> Any:
        if id(value) in self.of_batch:
            return self.of_batch[id(value)]
        place = next((one.place for one in self._contents() if one.holder is value), None)
        if place is None:
            return value
        self._stored_again.append(place)
        return ObjectSlot(str(place), value)

    def _template(self, place: ObjectPath, key: Any, value: Any, template: Callable[[Any], Any]) -> Any:
        where = f"{place}{'' if key is None else f' ({key!r})'}"
        self.refuse_made(value, where)
        for leaf in pytree.tree_leaves(value):
            if holds_traced(leaf) or keeps_of_step(leaf):
                raise CaptureError(
                    f"the step stores {_kind_of(leaf)} in {where} that keeps values of its "
                    "own batch (a counter, a tensor), which a compiled step would make only once. Store the values themselves "
                    "(in a list, tuple or dict), or do it in a hook such as on_train_batch_end"
                )
            if issubclass(type(leaf), torch.Tensor) and not is_traced(leaf) and type(leaf) is not MaskedRows:
                error = CaptureError(
                    f"the step rewrites {where} together with tensors of earlier steps, which a compiled step cannot repeat. "
                    "Only append to the list in the step, and trim it in a hook."
                )
                error.stored, error.storing = leaf, [Record(*change[:3], None) for change in self._found.changes]
                raise error
        return template(value)


def _known_set(place: ObjectPath, entries: set[Any] | frozenset[Any]) -> set[Any] | frozenset[Any]:
    """A set with numbers in place of counters.

    Raises:
        CaptureError: there is a tensor of the step in it, or another value that only the running step has.
    """
    found = type(entries)(map(exact_key, entries))
    if any(_is_of_the_step(one) for entry in found for one in (entry if type(entry) is tuple else (entry,))):
        raise CaptureError(
            f"the step puts a value of its own batch in the set {place}, which a compiled step does not know beforehand. Keep it "
            "in a list, or do it in a hook such as on_train_batch_end"
        )
    return found


def _is_of_the_step(value: Any) -> bool:
    return issubclass(type(value), FROM_THE_STEP) and (
        is_traced(value) or type(value) is MaskedRows or not issubclass(type(value), torch.Tensor)
    )


def holds_traced(value: Any, kinds: tuple[type, ...] = FROM_THE_STEP, depth: int = 0) -> bool:
    """Whether a function, or an object that the step made, holds a value of this very step where no place can stand for it.

    Args:
        kinds: of such values.
    """
    if _is_of_the_step(value):
        return depth > 0 and issubclass(type(value), kinds)
    return depth < 4 and any(holds_traced(one, kinds, depth + 1) for one in _held_by(value, depth))


def _held_by(value: Any, depth: int) -> tuple[Any, ...]:
    """The values in a function, or in an object whose parts nobody replaces."""
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
        return (*(cell.cell_contents for cell in cells), *(value.__defaults__ or ()))
    if isinstance(value, set | frozenset) or (isinstance(value, list | tuple) and depth):
        return tuple(value)[: policy.FEW]
    if isinstance(value, dict) and depth:
        return tuple(value.values())[: policy.FEW]
    if is_user_object(value) and not isinstance(value, torch.nn.Module):
        return tuple(vars(value).values())[: policy.FEW]
    return tuple(getattr(value, name, None) for name in slots(type(value))) if is_user_class(type(value)) else ()


def _kind_of(value: Any) -> str:
    return "a function" if isinstance(value, types.FunctionType | functools.partial) else f"a {type(value).__qualname__}"


def _is_in_cache(place: ObjectPath, key: Any) -> bool:
    return key in CACHES_OF_PARAMETERS or any(step[1] in CACHES_OF_PARAMETERS for step in place.steps if step[0] == "attr")
