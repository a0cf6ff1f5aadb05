"""Finds what a captured step changed in Python objects, by comparison, and takes it back."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.effects.descriptions import VALUES
from torch_compat.step.effects.effects import Effects, ObjectPath, Record, is_plain, replace_contents
from torch_compat.step.host.arrays import HostArray
from torch_compat.step.host.batch_texts import TracedText, TracedTexts
from torch_compat.step.host.calls import HostCalls, is_size, is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.scalars import HostScalar, was_written
from torch_compat.step.host.slots import BatchSlot, ObjectSlot, Places
from torch_compat.step.values import policy
from torch_compat.step.values.dict_contents import put_entries, put_in_order
from torch_compat.step.values.generators import same_state, set_state, state_of, use_of
from torch_compat.step.values.marks import PLAIN, holds_the_same, look, same, slots
from torch_compat.step.values.user_objects import attributes_of, is_user_class, is_user_object
from torch_compat.utilities.metric_types import is_metric_or_collection
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows
from xlatrain.bridge.capture.stand_ins import is_still, stood_for
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.tensors.live import is_live

_NOTHING_INSIDE = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))
_IN_ATTRIBUTES = (torch.nn.Module, *_NOTHING_INSIDE)  # modules are walked as such
_FROM_THE_STEP = (torch.Tensor, HostArray, HostScalar, HostFuture, TracedText, TracedTexts)
CACHES_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes in which torch's recurrent layers keep their parameters once more: taken back, but no effects of the step."""
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"),
)
"""Dicts of a module in which ``register_…_hook`` keeps hooks, and what it notes of them."""
_MODULE_INTERNALS = frozenset(
    {
        *HOOKS,
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_is_full_backward_hook",
        "_trainer",
        "_fabric",
        "_kept_steps",
        "_current_fx_name",
        "_metric_attributes",
        "_hparams",
        "_hparams_initial",
        "_param_requires_grad_state",  # of toggle_optimizer, whose flags a captured step follows itself
        "trainer",
    }
)


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
    """The ids of all containers, and of the ``__dict__`` of all objects, whose changes are recorded."""
    found = set()
    for seen in Recording(roots)._seen:
        contained = isinstance(seen.holder, list | dict | set | deque)  # attributes of such are not looked at
        found.add(id(seen.holder if contained else seen.holder.__dict__))
    return found


_OPEN: list[Recording] = []


def note_written(owner: torch.nn.Module, name: str) -> None:
    """Tell the recordings that the step assigns an attribute which it has not read."""
    for recording in _OPEN:
        recording.note_written(owner, name)


def changed_so_far() -> set[int]:
    """The ids of the objects that the step being captured has changed so far; of a module also where it has written a tensor."""
    found = {id(seen.holder) for recording in _OPEN for seen in recording._seen if seen.is_changed()}
    for recording in _OPEN:
        found.update(id(generator) for _, generator, state in recording._streams if not same_state(state_of(generator), state))
        found.update(id(array) for _, array, held in recording._arrays if not holds_the_same(array, held))
        for _, module, _, _ in recording._buffers:
            held = (*module._parameters.values(), *module._buffers.values())
            found.update([id(module)] if any(one is not None and is_traced(one) and was_written(one) for one in held) else [])
    return found


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
    for seen in before._seen:
        if seen.is_changed():
            raise refusal(f"changes {seen.place}")
    for place, array, held in before._arrays:
        if not holds_the_same(array, held):
            raise refusal(f"changes {place}")
    for place, generator, state in before._streams:
        if not same_state(state_of(generator), state):
            raise refusal(use_of(generator, str(place)))


@dataclass
class _Seen:
    """A snapshot of an object: its path, itself, and a shallow copy of what it held."""

    place: ObjectPath
    holder: Any
    held: Any

    def is_changed(self) -> bool:
        """Whether the object holds others now; what is in these is looked at as they are."""
        if isinstance(self.holder, list | deque):
            now: Any = dict(enumerate(self.holder))
        elif isinstance(self.holder, set):
            return self.holder != self.held
        else:
            now = self.holder if isinstance(self.holder, dict) else self.holder.__dict__
            now = {key: one for key, one in now.items() if isinstance(self.holder, dict) or key not in _MODULE_INTERNALS}
        held = self.held if isinstance(self.held, dict) else dict(enumerate(self.held))
        return now.keys() != held.keys() or any(_differs(held[key], one) for key, one in now.items())


@dataclass
class Recording:
    """The state of the objects before one capture, and afterwards the changes.

    Attributes:
        there_before: ids of the containers and objects that were found.
        calls: those that the step makes on the host.
        of_batch: by id of a container of the batch: its slot.
    """

    roots: Mapping[str, Any]
    calls: HostCalls = field(default_factory=HostCalls)
    of_batch: Mapping[int, BatchSlot] = field(default_factory=dict)
    _seen: list[_Seen] = field(default_factory=list)
    _changes: list[tuple[str, ObjectPath, Any, Any]] = field(default_factory=list)
    _streams: list[tuple[ObjectPath, Any, Any]] = field(default_factory=list)
    _arrays: list[tuple[ObjectPath, np.ndarray, np.ndarray]] = field(default_factory=list)
    _left: list[Callable[[], None]] = field(default_factory=list)
    _once: bool = False  # what one run has left cannot be left once more
    _reordered: list[str] = field(default_factory=list)
    _drawn: list[str] = field(default_factory=list)
    _overwritten: list[str] = field(default_factory=list)
    _stored_again: list[ObjectPath] = field(default_factory=list)
    _written: set[tuple[int, str]] = field(default_factory=set)
    _buffers: list[tuple[ObjectPath, torch.nn.Module, dict[str, Any], Collection[str]]] = field(default_factory=list)
    _hooks: list[tuple[ObjectPath, torch.nn.Module, dict[str, dict[int, Any]]]] = field(default_factory=list)
    _registered: list[str] = field(default_factory=list)
    _tensors: list[tuple[ObjectPath, torch.nn.Module, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _replaced: list[str] = field(default_factory=list)
    _of_library: set[ObjectPath] = field(default_factory=set)
    _packages: set[str] = field(default_factory=set)
    _made: set[tuple[ObjectPath, Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        known: set[int] = set()
        self.there_before = known
        modules = [one for root in self.roots.values() if isinstance(root, torch.nn.Module) for one in root.modules()]
        self._packages = {type(one).__module__.partition(".")[0] for one in modules} - policy.INFRASTRUCTURE
        for name, root in self.roots.items():
            self._see(ObjectPath(name), root, known, 0)

    def note_written(self, owner: torch.nn.Module, name: str) -> None:
        """The step assigns an attribute that it has not read: a change, even if it happens to have that value already."""
        self._written.add((id(owner), name))

    def _see(self, place: ObjectPath, value: Any, known: set[int], depth: int) -> None:
        if id(value) in known or depth > policy.DEPTH_OF_STATE or is_metric_or_collection(value):
            return
        if isinstance(value, list | deque):
            known.add(id(value))
            self._seen.append(_Seen(place, value, list(value)))
            self._see_entries(place, value, known, depth)
        elif isinstance(value, dict):
            known.add(id(value))
            self._seen.append(_Seen(place, value, dict(value)))
            for key, item in list(value.items()):
                if not isinstance(item, _NOTHING_INSIDE):  # a vocabulary has many
                    self._see(place.then("item", key), item, known, depth + 1)
        elif isinstance(value, set):
            known.add(id(value))
            self._seen.append(_Seen(place, value, set(value)))
        elif isinstance(value, tuple):
            self._see_entries(place, value, known, depth)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= policy.BYTES_OF_STATE:
                self._arrays.append((place, value, value.copy()))
        elif (stream := state_of(value)) is not None:
            known.add(id(value))
            self._streams.append((place, value, stream))
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
        held = {key: item for key, item in value.__dict__.items() if key not in _MODULE_INTERNALS}
        self._seen.append(_Seen(place, value, held))
        for key, item in held.items():
            if not isinstance(item, _IN_ATTRIBUTES):
                self._see(place.then("attr", key), item, known, depth + 1)
        if isinstance(value, torch.nn.Module):
            # Those that are traced by now are state of the program; a live one is of a module that is not in the tree.
            own = {key for key, held in value._buffers.items() if held is not None and is_traced(held) and not is_live(held)}
            outside = {key: held for key, held in value._buffers.items() if key not in own}
            self._buffers.append((place, value, outside, own))
            self._hooks.append((place, value, {name: dict(value.__dict__[name]) for name in HOOKS if value.__dict__.get(name)}))
            self._tensors.append((place, value, dict(value._parameters), dict(value._modules)))
            self._see(place.then("attr", "_non_persistent_buffers_set"), value._non_persistent_buffers_set, known, depth + 1)
            for key, child in value._modules.items():
                if child is not None and not is_metric_or_collection(child):  # theirs are host calls
                    self._see(place.then("attr", "_modules").then("item", key), child, known, 0)

    def finish(self) -> None:
        """Find what changed and take it back."""
        for place, generator, before in self._streams:
            after = state_of(generator)
            if not same_state(after, before):
                set_state(generator, before)
                self._drawn.append(use_of(generator, str(place)))
                self._left.append(functools.partial(set_state, generator, after))
                self._once = self._once or type(after) is int  # a file on disk
        for place, array, before in self._arrays:
            if not holds_the_same(array, before):
                self._left.append(functools.partial(np.copyto, array, array.copy()))
                array[...] = before
                self._overwritten.append(str(place))
        for seen in self._seen:
            if isinstance(seen.holder, list | deque):
                self._finish_sequence(seen)
            elif isinstance(seen.holder, dict):
                self._finish_mapping(seen, seen.holder, "item", set())
            elif isinstance(seen.holder, set):
                if seen.holder != seen.held:
                    self._changes.append(("contents", seen.place, None, set(map(_known, seen.holder))))
                    replace_contents(seen.holder, seen.held)
            else:
                self._finish_mapping(
                    seen, seen.holder.__dict__, "attr", {name for owner, name in self._written if owner == id(seen.holder)}
                )
        for place, module, outside, state in self._buffers:
            self._finish_buffers(place, module._buffers, outside, state)
        for place, module, before in self._hooks:
            for name in HOOKS:
                self._finish_hooks(place, module.__dict__.get(name) or {}, before.get(name, {}))
        for place, module, parameters, children in self._tensors:
            self._finish_tensors(place, module._parameters, parameters, _is_parameter)
            self._finish_tensors(place, module._modules, children, self._is_made)
        self._changes = [change for change in self._changes if not _is_in_cache(*change[1:3])]

    def _finish_buffers(
        self, place: ObjectPath, buffers: dict[str, Any], outside: Mapping[str, Any], state: Collection[str]
    ) -> None:
        """Find buffers that the step made or replaced and that are no state of the program: registered in it, or None before."""
        for key, now in list(buffers.items()):
            if key in state or (key in outside and outside[key] is now) or now is None:
                continue
            if key in outside and is_still(outside[key], now):
                buffers[key] = outside[key]
                continue
            self._changes.append(("setbuffer", place, key, now))
            if key in outside:
                buffers[key] = outside[key]
            else:
                del buffers[key]
                self._made.add((place, key))

    def _finish_tensors(
        self, place: ObjectPath, now: dict[str, Any], before: dict[str, Any], ends: Callable[[Any], bool]
    ) -> None:
        """Find parameters and modules that the step put there, which would stay without values."""
        changed = [key for key in {**before, **now} if now.get(key) is not before.get(key)]
        if made := [key for key in changed if ends(now.get(key))]:
            self._replaced += [str(place.then("attr", key)) for key in made]
            now.clear()
            now.update(before)

    def _is_made(self, value: Any) -> bool:
        """Whether the step made a module that has tensors of its own, or one that holds such."""
        if not isinstance(value, torch.nn.Module) or is_metric_or_collection(value):
            return False
        made = [one for one in value.modules() if id(one) not in self.there_before]
        held = [tensor for one in made for tensor in (*one._parameters.values(), *one._buffers.values())]
        return any(is_traced(tensor) and not is_live(tensor) for tensor in held)

    def refuse_made(self, tree: Any, where: str) -> None:
        """Raises:
        CaptureError: the step keeps or gives away a module that it has made, whose tensors have no values.
        """
        if (made := next(filter(self._is_made, pytree.tree_leaves(tree)), None)) is not None:
            raise CaptureError(
                f"the step makes a {type(made).__qualname__} and keeps it in {where}, whose tensors a compiled step would make "
                "only once. Make it in __init__ or configure_model, where its parameters get an optimizer too"
            )

    def _finish_hooks(self, place: ObjectPath, now: dict[int, Any], before: dict[int, Any]) -> None:
        """Find hooks that the step has registered on a module, or removed, and left so."""
        if now.keys() != before.keys():
            self._registered.append(str(place))
            now.clear()
            now.update(before)

    def _finish_sequence(self, seen: _Seen) -> None:
        found, before = list(seen.holder), seen.held
        there = {id(one): one for one in before}
        now = [one if (original := stood_for(one)) is None else there.get(id(original), one) for one in found]
        if len(now) == len(before) and all(a is b for a, b in zip(before, now, strict=True)):
            if any(a is not b for a, b in zip(before, found, strict=True)):
                replace_contents(seen.holder, before)
            return
        kept = _kept(before, now, getattr(seen.holder, "maxlen", None))
        if kept is not None:
            self._changes += [("append", seen.place, None, item) for item in now[kept:]]
        else:
            own = [one if is_live(one) else traced for one, traced in zip(now, found, strict=True)]
            self._changes.append(("contents", seen.place, None, own))
        replace_contents(seen.holder, before)

    def _finish_mapping(self, seen: _Seen, holder: dict[Any, Any], kind: str, written: set[str]) -> None:
        now = {_known(key): item for key, item in holder.items() if kind == "item" or key not in _MODULE_INTERNALS}
        for key, item in now.items():
            if key not in seen.held or _differs(seen.held[key], item) or (key in written and _is_same_each_time(item)):
                self._changes.append((f"set{kind}", seen.place, key, item))
                if key not in seen.held:
                    self._made.add((seen.place, key))
        self._changes += [(f"del{kind}", seen.place, key, None) for key in seen.held if key not in now]
        stayed = [key for key in now if key in seen.held]
        reordered = kind == "item" and stayed != [key for key in seen.held if key in now]
        if reordered:
            self._reordered.append(str(seen.place))
            self._left.append(functools.partial(put_in_order, holder, stayed))
            self._once = self._once or list(now)[: len(stayed)] != stayed  # what is new comes after them
        if reordered or now.keys() != seen.held.keys() or any(now[key] is not seen.held[key] for key in now):
            if kind == "item":
                put_entries(holder, seen.held)
                return
            for key in [key for key in holder if key not in seen.held and key not in _MODULE_INTERNALS]:
                del holder[key]
            holder.update(seen.held)

    def kept(self) -> list[Any]:
        """The values that the step has stored."""
        return [value for _, _, _, value in self._changes]

    def effects(self, template: Callable[[Any], Any], places: Places | None = None) -> Effects:
        """The changes, with the tensors of this capture made outputs of the step by ``template``.

        Args:
            places: of containers that are at several.

        Raises:
            CaptureError: a change keeps a tensor of an earlier step, which a record cannot stand for; or the step leaves a hook
                on a module.
        """
        refusal = ""
        if self._overwritten:
            refusal = (
                f"the step writes to the numpy array {self._overwritten[0]}, which a compiled step would do only once. Keep it "
                "in a buffer (self.register_buffer), or write to it in a hook such as on_train_batch_end"
            )
        if self._reordered:
            refusal = (
                f"the step changes the order of the entries of {self._reordered[0]}, which a compiled step would do only once. "
                "Do it in a hook such as on_train_batch_end"
            )
        if self._registered:
            raise CaptureError(
                f"the step registers a hook on {self._registered[0]}, or removes one, and leaves it so, which a compiled step "
                "would do only once. Remove it again in the same step, or do it in a hook such as on_train_batch_start"
            )
        if self._replaced:
            raise CaptureError(
                f"the step makes {self._replaced[0]}, or replaces it, which a compiled step would do only once, without its "
                "values. Make modules and parameters in __init__ or configure_model, where they get an optimizer too"
            )
        if self._drawn:
            refusal = (
                f"the step {self._drawn[0]}, which a compiled step would do only once. Draw with "
                "torch (torch.rand, …) in the step, or do it in a hook or in the dataset"
            )
        tied = (places or Places()).tied
        records = tuple(self._record(*change, template, tied) for change in self._changes)
        if self._stored_again:
            refusal = (
                f"the step stores or returns {self._stored_again[0]}, a list, dict or set that is there already; a compiled step "
                "would make another. Take a copy of it, or do it in a hook such as on_train_batch_start"
            )
        return Effects(records, () if self._once else tuple(self._left), refusal, only_once=self._once)

    def _record(
        self,
        kind: str,
        place: ObjectPath,
        key: Any,
        value: Any,
        template: Callable[[Any], Any],
        tied: Callable[[Any, Any], Any],
    ) -> Record:
        made = (place, key) in self._made
        if any(map(_is_of_the_step, key if type(key) is tuple else (key,))):
            raise CaptureError(
                f"the step makes an entry of {place} under a key that is a value of its own batch, which a compiled step "
                "does not know beforehand. Keep a list of pairs, or make the entry in a hook such as on_train_batch_end"
            )
        own = value
        value = self.with_objects(value)
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
        before = next(seen.held.get(key) for seen in self._seen if seen.place == place)
        return Record("setcache", place, key, filled, made, look(before))

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

    def _slot_of(self, value: Any) -> Any:
        if id(value) in self.of_batch:
            return self.of_batch[id(value)]
        place = next((seen.place for seen in self._seen if seen.holder is value), None)
        if place is None:
            return value
        self._stored_again.append(place)
        return ObjectSlot(str(place), value)

    def _template(self, place: ObjectPath, key: Any, value: Any, template: Callable[[Any], Any]) -> Any:
        self.refuse_made(value, f"{place}{'' if key is None else f' ({key!r})'}")
        for leaf in pytree.tree_leaves(value):
            if holds_traced(leaf):
                raise CaptureError(
                    f"the step stores {_kind_of(leaf)} in {place}{'' if key is None else f' ({key!r})'} that keeps values of its "
                    "own batch (a counter, a tensor), which a compiled step would make only once. Store the values themselves "
                    "(in a list, tuple or dict), or do it in a hook such as on_train_batch_end"
                )
            if issubclass(type(leaf), torch.Tensor) and not is_traced(leaf) and type(leaf) is not MaskedRows:
                error = CaptureError(
                    f"the step rewrites {place}{'' if key is None else f' ({key!r})'} together with tensors of earlier "
                    "steps, which "
                    "a compiled step cannot repeat. Only append to the list in the step, and trim it in a hook."
                )
                error.stored = leaf
                raise error
        return template(value)


def _known(key: Any) -> Any:
    """A key or an entry of a set: of a counter, whose hash was asked for, the number that is guarded since then."""
    if type(key) is HostScalar:
        return key._exact()
    return tuple(map(_known, key)) if type(key) is tuple else key


def _known_set(place: ObjectPath, entries: set[Any] | frozenset[Any]) -> set[Any] | frozenset[Any]:
    """A set with numbers in place of counters.

    Raises:
        CaptureError: there is a tensor of the step in it, or another value that only the running step has.
    """
    known = type(entries)(map(_known, entries))
    if any(_is_of_the_step(one) for entry in known for one in (entry if type(entry) is tuple else (entry,))):
        raise CaptureError(
            f"the step puts a value of its own batch in the set {place}, which a compiled step does not know beforehand. Keep it "
            "in a list, or do it in a hook such as on_train_batch_end"
        )
    return known


def _is_parameter(value: Any) -> bool:
    """Whether it is a parameter: fastai's WeightDrop puts a plain tensor in the place of one for the time of a step."""
    return isinstance(value, torch.nn.Parameter)


def _is_of_the_step(value: Any) -> bool:
    return issubclass(type(value), _FROM_THE_STEP) and (
        is_traced(value) or type(value) is MaskedRows or not issubclass(type(value), torch.Tensor)
    )


def holds_traced(value: Any, kinds: tuple[type, ...] = _FROM_THE_STEP, depth: int = 0) -> bool:
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


def _kept(before: list[Any], now: list[Any], most: int | None) -> int | None:
    """The number of entries of ``now`` that were there before, if all others were appended; None if it came about otherwise.

    Args:
        most: of a deque that drops its first entries.
    """
    for dropped in range(1 + (len(before) if most == len(now) else 0)):
        rest = before[dropped:]
        if len(rest) <= len(now) and all(a is b for a, b in zip(rest, now, strict=False)):
            return len(rest)
    return None


def _is_in_cache(place: ObjectPath, key: Any) -> bool:
    return key in CACHES_OF_PARAMETERS or any(step[1] in CACHES_OF_PARAMETERS for step in place.steps if step[0] == "attr")


def _is_same_each_time(item: Any) -> bool:
    """Whether an assignment of ``item`` counts though it changes nothing: numbers, texts, shapes, devices, dtypes, parameters."""
    if isinstance(item, tuple | frozenset):
        return all(map(_is_same_each_time, item))
    return is_plain(item) or isinstance(item, VALUES) or stood_for(item) is not None


def _differs(before: Any, now: Any) -> bool:
    """Whether an attribute's value changed; containers that stayed the same object are compared on their own."""
    if same(now, before) or is_still(before, now):
        return False
    if isinstance(now, list | dict | deque | set):
        return True  # another one, whatever is in it: it may be at other places, too
    if isinstance(before, PLAIN) or any(issubclass(type(leaf), _FROM_THE_STEP) for leaf in (before, *pytree.tree_leaves(now))):
        return True
    try:
        return bool(before != now)
    except Exception:  # values of a user's own may compare in any way, and arrays have no truth value
        return True
