"""Python side effects of a captured step: tensors that it stores in objects are put there with real values after each step.

While a step is captured its Python runs once, on tensors without values. Everything that this run changed in the attributes
and containers of the module, its submodules, the callbacks and the datamodule is found by comparison, taken back, and kept as a
list of records (append, set attribute, set item, replace contents) that are carried out after every executed step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.functional.batch_texts import TracedText, TracedTexts
from torch_compat.functional.deferred import Deferred
from torch_compat.functional.generators import same_state, set_state, state_of, use_of
from torch_compat.functional.host_calls import ResultPlace, TextPlace, is_traced
from torch_compat.functional.host_scalars import HostScalar
from torch_compat.utilities.metric_types import is_metric_or_collection
from xlatrain.bridge.errors import CaptureError, is_user_file

_MAX_DEPTH = 6
_HEAP_TYPE = 1 << 9
_OUTLINED = 64  # entries
_NOTHING_INSIDE = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))
_MAX_OUTSIDE = 100_000  # entries of a collection outside of the followed objects: more are data
_CONTAINERS = (list, dict, deque, set)
CACHES_OF_PARAMETERS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes in which torch's recurrent layers keep their parameters once more: taken back, but no effects of the step."""
_MODULE_INTERNALS = frozenset(
    {
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_is_full_backward_hook",
        "_trainer",
        "_fabric",
        "_current_fx_name",
        "_metric_attributes",
        "_hparams",
        "_hparams_initial",
        "_param_requires_grad_state",  # of toggle_optimizer, whose flags a captured step follows itself
        "trainer",
    }
)

Step = tuple[str, Any]
"""One step of a path: ``("attr", name)`` or ``("item", key or index)``."""


@dataclass(frozen=True)
class Place:
    """Where an object is: a root and the steps from it."""

    root: str
    steps: tuple[Step, ...] = ()

    def then(self, *step: Any) -> Place:
        return Place(self.root, (*self.steps, (step[0], step[1])))

    def find(self, roots: Mapping[str, Any], *, strictly: bool = False) -> Any:
        """The object that is at this place now.

        Raises:
            KeyError, IndexError: there is none; only if ``strictly`` also where a ``defaultdict`` would make one.
        """
        found = roots[self.root]
        for kind, key in self.steps:
            if strictly and isinstance(found, dict) and key not in found:
                raise KeyError(key)
            found = found.__dict__[key] if kind == "attr" else found[key]
        return found

    def lists_whose_last_it_is_in(self) -> list[Place]:
        """The lists around it of which it is in the last entry."""
        return [Place(self.root, self.steps[:n]) for n, step in enumerate(self.steps) if step == ("item", -1)]

    @property
    def name(self) -> str | None:
        """The last attribute, or variable, on the way; None where only entries are."""
        names = [key for kind, key in self.steps if kind == "attr"]
        return names[-1] if names else self.root.rpartition(".")[2].rpartition(" ")[2]

    @property
    def is_in_container(self) -> bool:
        """Whether it is an entry of a list or dict, or below one."""
        before = [("attr", ""), *self.steps]
        return any(kind == "item" and last != ("attr", "_modules") for last, (kind, _) in zip(before, self.steps, strict=False))

    def attribute(self, last: str | None) -> tuple[str, str] | None:
        """``(owner, attribute)`` that a change of ``last`` at this place changes: the path of a module, or another root's name.

        None for a place that is not below an attribute.
        """
        names, steps = [], list(self.steps)
        while len(steps) > 1 and steps[0] == ("attr", "_modules"):
            names.append(str(steps[1][1]))
            steps = steps[2:]
        name = steps[0][1] if steps and steps[0][0] == "attr" else last
        if not isinstance(name, str):
            return None
        return (".".join(names) if self.root == "self" or names else self.root), name

    def __str__(self) -> str:
        """As a user writes it: a submodule is an attribute."""
        text, steps = self.root, list(self.steps)
        while steps:
            kind, key = steps.pop(0)
            if (kind, key) == ("attr", "_modules") and steps:
                kind, key = "attr", steps.pop(0)[1]
            text += f".{key}" if kind == "attr" else f"[{key!r}]"
        return text


@dataclass(frozen=True)
class Record:
    """One change: ``kind`` is ``append``, ``contents``, ``setattr``, ``setitem``, ``delattr`` or ``delitem``.

    Attributes:
        made: whether there was nothing of that key before.
    """

    kind: str
    place: Place
    key: Any
    value: Any
    made: bool = False

    @property
    def assigns(self) -> bool:
        """Whether an attribute is set or deleted, rather than a container changed."""
        return self.kind in ("setattr", "delattr")

    def apply(self, target: Any, fill: Callable[[Any], Any]) -> None:
        if self.kind == "append":
            target.append(fill(self.value))
        elif self.kind == "contents":
            _replace_contents(target, fill(self.value))
        elif self.kind == "setattr":
            target.__dict__[self.key] = fill(self.value)
        elif self.kind == "setitem":
            target[self.key] = fill(self.value)
        elif self.kind == "delattr":
            target.__dict__.pop(self.key, None)
        else:
            target.pop(self.key, None)

    def __str__(self) -> str:
        """The change as Python."""
        if self.kind == "append":
            return f"{self.place}.append({describe(self.value)})"
        if self.kind == "contents":
            return f"{self.place}[:] = {describe(self.value)}"
        target = f"{self.place}.{self.key}" if self.assigns else f"{self.place}[{self.key!r}]"
        return f"del {target}" if self.kind.startswith("del") else f"{target} = {describe(self.value)}"


@dataclass(frozen=True)
class Effects:
    """What a step changes in Python objects, in order."""

    records: tuple[Record, ...] = ()

    def replay(self, roots: Mapping[str, Any], fill: Callable[[Any], Any]) -> None:
        """Carry the changes out; ``fill`` puts real values into a recorded value."""
        targets = [record.place.find(roots) for record in self.records]  # all before any: one may move what is last in a list
        for record, target in zip(self.records, targets, strict=True):
            record.apply(target, fill)

    @property
    def fill_containers(self) -> bool:
        """Whether it appends to lists or makes entries."""
        return any(record.kind == "append" or record.made or record.place.is_in_container for record in self.records)

    def depend_on(self, looked_at: Collection[str]) -> list[Place]:
        """Lists and dicts on whose contents it may depend what the step does: those that it fills and also looks at, and lists
        whose last entry it changes, since this could as well be the n-th.

        Args:
            looked_at: names of attributes and variables with which the step's code does more than to fill them.
        """
        found = {place: None for record in self.records for place in record.place.lists_whose_last_it_is_in()}
        for record in self.records:
            fills = record.kind == "append" or (record.kind == "setitem" and record.made)
            if fills and (record.place.name is None or record.place.name in looked_at):
                found[record.place] = None
        return list(found)

    def attributes(self, *, rebound: bool = False) -> frozenset[tuple[str, str]]:
        """``(owner, attribute)`` of all that changes (see :meth:`Place.attribute`), or only of what is assigned."""
        found = [r.place.attribute(r.key if r.assigns else None) for r in self.records if r.assigns or not rebound]
        return frozenset(one for one in found if one is not None)

    def containers(self, roots: Mapping[str, Any]) -> set[int]:
        """The ids of the containers and objects whose contents change."""
        found = set()
        for record in self.records:
            with contextlib.suppress(KeyError, IndexError):  # one that the step makes
                target = record.place.find(roots)
                found.add(id(target.__dict__ if record.assigns else target))
        return found

    @functools.cached_property
    def hold_results(self) -> bool:
        """Whether a result of a host call is among what is stored."""
        leaves = [leaf for record in self.records for leaf in pytree.tree_leaves(record.value)]
        return any(isinstance(leaf, ResultPlace | TextPlace) for leaf in leaves)

    @functools.cached_property
    def assume(self) -> tuple[tuple[Place, Any], ...]:
        """Where the step runs: places that must be there, with None; there, what must not be, with its kind of record and key."""
        found: dict[tuple[Place, Any], None] = {}
        for record in self.records:
            if record.made and isinstance(record.value, _CONTAINERS):
                found[record.place, (record.kind, record.key)] = None
            elif record.place.is_in_container:
                found[record.place, None] = None
        return tuple(found)

    def fit(self, roots: Mapping[str, Any]) -> bool:
        """Whether lists and dicts that the step made are still not there, and those that it found are."""
        for place, made in self.assume:
            try:
                target = place.find(roots, strictly=True)
            except (KeyError, IndexError, AttributeError, TypeError):
                return False
            if made is not None and made[1] in (target.__dict__ if made[0] == "setattr" else target):
                return False
        return True

    @property
    def make_containers(self) -> bool:
        """Whether a list or dict is put where there was none, which steps that follow find there."""
        return any(r.kind in ("setattr", "setitem") and isinstance(r.value, _CONTAINERS) for r in self.records)

    def fingerprint(self) -> str:
        """What must be the same in every capture of the step."""
        return "\n".join(map(str, self.records))

    def __bool__(self) -> bool:
        return bool(self.records)


class _Unlike:
    """Equal to nothing that a step assigns."""


@contextlib.contextmanager
def forgotten(effects: Effects, roots: Mapping[str, Any]) -> Iterator[bool]:
    """Entries and attributes to which a step gives the same plain value each time have another one for now: the next capture
    shows whether the step really assigns them each time. Gives whether there are any.
    """
    taken: list[tuple[dict[Any, Any], Any, Any]] = []
    for record in effects.records:
        if record.kind in ("setattr", "setitem") and _is_plain(record.value):
            target = record.place.find(roots)
            holder = target.__dict__ if record.kind == "setattr" else target
            if isinstance(holder, dict) and _is_plain(holder.get(record.key, _Unlike)) and holder[record.key] == record.value:
                taken.append((holder, record.key, holder[record.key]))
                dict.__setitem__(holder, record.key, _Unlike())
    try:
        yield bool(taken)
    finally:
        for holder, key, value in reversed(taken):
            dict.__setitem__(holder, key, value)


class EffectRecorder:
    """Records what captured steps change in the objects reachable from ``roots`` (name → object)."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = dict(roots)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """On leaving, all changes are taken back; the recording knows what they were."""
        recording = Recording(self.roots)
        _OPEN.append(recording)
        try:
            yield recording
        finally:
            _OPEN.remove(recording)
            recording.finish()


_OPEN: list[Recording] = []


def note_written(owner: torch.nn.Module, name: str) -> None:
    """Tell the recordings that the step assigns an attribute which it has not read."""
    for recording in _OPEN:
        recording.note_written(owner, name)


@dataclass
class _Seen:
    """An object as it was: its place, itself, and a shallow copy of what it held."""

    place: Place
    holder: Any
    held: Any


@dataclass
class Recording:
    """The state of the objects before one capture, and afterwards the changes."""

    roots: Mapping[str, Any]
    _seen: list[_Seen] = field(default_factory=list)
    _changes: list[tuple[str, Place, Any, Any]] = field(default_factory=list)
    _streams: list[tuple[Place, Any, Any]] = field(default_factory=list)
    _arrays: list[tuple[Place, np.ndarray, np.ndarray]] = field(default_factory=list)
    _drawn: list[str] = field(default_factory=list)
    _overwritten: list[str] = field(default_factory=list)
    _written: set[tuple[int, str]] = field(default_factory=set)
    _made: set[tuple[Place, Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        known: set[int] = set()
        for name, root in self.roots.items():
            self._see(Place(name), root, known, 0)

    def note_written(self, owner: torch.nn.Module, name: str) -> None:
        """The step assigns an attribute that it has not read: a change, even if it happens to have that value already."""
        self._written.add((id(owner), name))

    def _see(self, place: Place, value: Any, known: set[int], depth: int) -> None:
        if id(value) in known or depth > _MAX_DEPTH or is_metric_or_collection(value):
            return
        if isinstance(value, list | deque):
            known.add(id(value))
            self._seen.append(_Seen(place, value, list(value)))
            last = len(value) - 1
            for index, item in enumerate(value if last < _MAX_OUTSIDE else ()):
                if not isinstance(item, _NOTHING_INSIDE):
                    self._see(place.then("item", -1 if index == last else index), item, known, depth + 1)
        elif isinstance(value, dict):
            known.add(id(value))
            self._seen.append(_Seen(place, value, dict(value)))
            for key, item in list(value.items()):
                self._see(place.then("item", key), item, known, depth + 1)
        elif isinstance(value, set):
            known.add(id(value))
            self._seen.append(_Seen(place, value, set(value)))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= LARGE_ARRAY:
                self._arrays.append((place, value, value.copy()))
        elif (stream := state_of(value)) is not None:
            known.add(id(value))
            self._streams.append((place, value, stream))
        elif isinstance(value, torch.nn.Module) or depth == 0 or is_user_object(value):
            self._see_object(place, value, known, depth)

    def _see_object(self, place: Place, value: Any, known: set[int], depth: int) -> None:
        known.add(id(value))
        held = {key: item for key, item in value.__dict__.items() if key not in _MODULE_INTERNALS}
        self._seen.append(_Seen(place, value, held))
        for key, item in held.items():
            if not isinstance(item, torch.nn.Module):
                self._see(place.then("attr", key), item, known, depth + 1)
        if isinstance(value, torch.nn.Module):
            for key, child in value._modules.items():
                if child is not None and not is_metric_or_collection(child):  # theirs are host calls
                    self._see(place.then("attr", "_modules").then("item", key), child, known, 0)

    def finish(self) -> None:
        """Find what changed and take it back."""
        for place, generator, before in self._streams:
            if not same_state(state_of(generator), before):
                set_state(generator, before)
                self._drawn.append(use_of(generator, str(place)))
        for place, array, before in self._arrays:
            if not same_values(array, before):
                array[...] = before
                self._overwritten.append(str(place))
        for seen in self._seen:
            if isinstance(seen.holder, list | deque):
                self._finish_sequence(seen)
            elif isinstance(seen.holder, dict):
                self._finish_mapping(seen, seen.holder, "item", set())
            elif isinstance(seen.holder, set):
                if seen.holder != seen.held:
                    self._changes.append(("contents", seen.place, None, set(seen.holder)))
                    _replace_contents(seen.holder, seen.held)
            else:
                self._finish_mapping(
                    seen, seen.holder.__dict__, "attr", {name for owner, name in self._written if owner == id(seen.holder)}
                )
        self._changes = [change for change in self._changes if not _is_in_cache(*change[1:3])]

    def _finish_sequence(self, seen: _Seen) -> None:
        now = list(seen.holder)
        before = seen.held
        if len(now) == len(before) and all(a is b for a, b in zip(before, now, strict=True)):
            return
        kept = _kept(before, now, getattr(seen.holder, "maxlen", None))
        if kept is not None:
            self._changes += [("append", seen.place, None, item) for item in now[kept:]]
        else:
            self._changes.append(("contents", seen.place, None, now))
        _replace_contents(seen.holder, before)

    def _finish_mapping(self, seen: _Seen, holder: dict[Any, Any], kind: str, written: set[str]) -> None:
        now = {key: item for key, item in holder.items() if kind == "item" or key not in _MODULE_INTERNALS}
        for key, item in now.items():
            if key not in seen.held or _differs(seen.held[key], item) or (key in written and _is_plain(item)):
                self._changes.append((f"set{kind}", seen.place, key, item))
                if key not in seen.held:
                    self._made.add((seen.place, key))
        self._changes += [(f"del{kind}", seen.place, key, None) for key in seen.held if key not in now]
        if now.keys() != seen.held.keys() or any(now[key] is not seen.held[key] for key in now):
            for key in [key for key in now if key not in seen.held]:
                del holder[key]
            dict.update(holder, seen.held)  # a Counter's own update adds

    def effects(self, template: Callable[[Any], Any]) -> Effects:
        """The changes, with the tensors of this capture made outputs of the step by ``template``.

        Raises:
            CaptureError: a change keeps a tensor of an earlier step, which a record cannot stand for; or the step drew from a
                random generator, or wrote to a numpy array, that it keeps.
        """
        if self._overwritten:
            raise CaptureError(
                f"the step writes to the numpy array {self._overwritten[0]}, which a compiled step would do only once. Keep it "
                "in a buffer (self.register_buffer), or write to it in a hook such as on_train_batch_end"
            )
        if self._drawn:
            raise CaptureError(
                f"the step {self._drawn[0]}, which a compiled step would do only once. Draw with "
                "torch (torch.rand, …) in the step, or do it in a hook or in the dataset"
            )
        records = [
            Record(kind, place, key, self._template(place, key, value, template), (place, key) in self._made)
            for kind, place, key, value in self._changes
        ]
        return Effects(tuple(records))

    def _template(self, place: Place, key: Any, value: Any, template: Callable[[Any], Any]) -> Any:
        for leaf in pytree.tree_leaves(value):
            if issubclass(type(leaf), torch.Tensor) and not is_traced(leaf):
                raise CaptureError(
                    f"the step rewrites {place}{'' if key is None else f' ({key!r})'} together with tensors of earlier "
                    "steps, which "
                    "a compiled step cannot repeat. Only append to the list in the step, and trim it in a hook."
                )
        return template(value)


def _kept(before: list[Any], now: list[Any], most: int | None) -> int | None:
    """How many entries of ``now`` were there before, if all others were appended; None if it came about in another way.

    Args:
        most: of a deque that drops its first entries.
    """
    for dropped in range(1 + (len(before) if most == len(now) else 0)):
        rest = before[dropped:]
        if len(rest) <= len(now) and all(a is b for a, b in zip(rest, now, strict=False)):
            return len(rest)
    return None


def outline(place: Place, roots: Mapping[str, Any]) -> Hashable:
    """What a step could learn of a container without values of tensors: its length, and plain entries."""
    try:
        found = place.find(roots, strictly=True)
    except (KeyError, IndexError, AttributeError, TypeError):
        return None
    if len(found) > _OUTLINED:
        return len(found)
    return tuple(item if _is_plain(item) else type(item) for item in found)


def containers_around(objects: Iterable[Any]) -> dict[str, Any]:
    """Name → list, dict, set or deque that methods of ``objects`` reach in their module or closure."""
    found: dict[str, Any] = {}
    for kind in {kind for one in objects for kind in type(one).__mro__ if _is_user_class(kind)}:
        outside = {f"{kind.__module__}.{name}": value for name, value in vars(sys.modules[kind.__module__]).items()}
        for function in vars(kind).values():
            if isinstance(function, types.FunctionType) and function.__closure__:
                cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
                outside.update({f"{kind.__qualname__}: {name}": cell.cell_contents for name, cell in cells if _is_filled(cell)})
        found.update({name: value for name, value in outside.items() if _is_collection(value) and ".__" not in name})
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_collection(value: Any) -> bool:
    return isinstance(value, list | dict | set | deque) and len(value) <= _MAX_OUTSIDE


def describe(tree: Any) -> str:
    """A recorded value or result as text that is equal for equal captures: an object by its type, since its address changes."""
    leaves, spec = pytree.tree_flatten(tree)
    if spec.is_leaf() and _has_stable_text(tree):
        return repr(tree)
    return f"{[leaf if _has_stable_text(leaf) else type(leaf) for leaf in leaves]} {spec}"


def _has_stable_text(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex | str | bytes | type(None)) or hasattr(
        type(leaf), "__dataclass_fields__"
    )


LARGE_ARRAY = 1 << 20
"""Bytes: larger arrays are data; what is in them is not followed."""


def same_values(array: np.ndarray, copy: np.ndarray) -> bool:
    """Whether an array has the bytes of its copy."""
    if array.flags.c_contiguous and array.dtype != object:
        return np.array_equal(array.reshape(-1).view(np.uint8), copy.reshape(-1).view(np.uint8))
    return array.tobytes() == copy.tobytes()


def _is_in_cache(place: Place, key: Any) -> bool:
    return key in CACHES_OF_PARAMETERS or any(step[1] in CACHES_OF_PARAMETERS for step in place.steps if step[0] == "attr")


def _differs(before: Any, now: Any) -> bool:
    """Whether an attribute's value changed; containers that stayed the same object are compared on their own."""
    if before is now:
        return False
    if any(issubclass(type(leaf), _FROM_THE_STEP) for leaf in (before, *pytree.tree_leaves(now))):
        return True
    try:
        return bool(before != now)
    except Exception:
        return True


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


_FROM_THE_STEP = (torch.Tensor, HostScalar, Deferred, TracedText, TracedTexts)


def is_user_object(value: Any) -> bool:
    """Whether ``value`` is an object of a class of the user's own, so that its attributes may be state of the step."""
    return isinstance(getattr(value, "__dict__", None), dict) and _is_user_class(type(value))


def may_be_followed(value: Any) -> bool:
    """Whether an :class:`EffectRecorder` can have ``value`` as a root."""
    in_python = type(value).__flags__ & _HEAP_TYPE  # reads of its attributes can be noticed
    return isinstance(value, list | dict | set | deque) or bool(in_python and isinstance(getattr(value, "__dict__", None), dict))


@functools.cache
def _is_user_class(kind: type) -> bool:
    if kind in (types.SimpleNamespace, argparse.Namespace):
        return True
    if issubclass(kind, type | types.FunctionType | types.ModuleType | torch.Tensor | torch.utils.data.Dataset):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" if file is None else is_user_file(file)  # a notebook's __main__ has no file


def _replace_contents(holder: Any, contents: Sequence[Any] | set[Any]) -> None:
    holder.clear()
    (holder.update if isinstance(holder, set) else holder.extend)(contents)
