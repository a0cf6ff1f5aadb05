"""Python side effects of a captured step: tensors that it stores in objects are put there with real values after each step.

While a step is captured its Python runs once, on tensors without values. Everything that this run changed in the attributes
and containers of the module, its submodules, the callbacks and the datamodule is found by comparison, taken back, and kept as a
list of records (append, set attribute, set item, replace contents) that are carried out after every executed step.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_compat.step.effects.descriptions import describe
from torch_compat.step.host.slots import SLOTS, ValueSlot
from torch_compat.step.values import policy
from torch_compat.step.values.marks import look, same
from torch_compat.step.values.names import MISSING

_CONTAINERS = (list, dict, deque, set)
Step = tuple[str, Any]
"""One step of a path: ``("attr", name)`` or ``("item", key or index)``."""


@dataclass(frozen=True)
class ObjectPath:
    """The path of an object: a root and the steps from it."""

    root: str
    steps: tuple[Step, ...] = ()

    def then(self, *step: Any) -> ObjectPath:
        return ObjectPath(self.root, (*self.steps, (step[0], step[1])))

    def find(self, roots: Mapping[str, Any], *, strictly: bool = False) -> Any:
        """The object that is at this place now.

        Raises:
            KeyError, IndexError: there is none; only if ``strictly`` also where a ``defaultdict`` would make one.
        """
        found = roots[self.root]
        for kind, key in self.steps:
            found = found.__dict__ if kind == "attr" else found
            if strictly and isinstance(found, dict) and key not in found:
                raise KeyError(key)
            found = found[key]
        return found

    def lists_whose_last_it_is_in(self) -> list[ObjectPath]:
        """The lists around it of which it is in the last entry."""
        return [ObjectPath(self.root, self.steps[:n]) for n, step in enumerate(self.steps) if step == ("item", -1)]

    @property
    def name(self) -> str | None:
        """The last attribute, or variable, on the way; None where only entries are."""
        names = [key for kind, key in self.steps if kind == "attr"]
        return names[-1] if names else self.root.partition(" (")[0].rpartition(".")[2]

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
        """The path as a user writes it: a submodule is an attribute."""
        text, steps = self.root, list(self.steps)
        while steps:
            kind, key = steps.pop(0)
            if (kind, key) == ("attr", "_modules") and steps:
                kind, key = "attr", steps.pop(0)[1]
            text += f".{key}" if kind == "attr" else f"[{key!r}]"
        return text


@dataclass(frozen=True)
class Record:
    """A change: ``kind`` is ``append``, ``contents``, ``setattr``, ``setbuffer``, ``setcache``, ``setitem``, ``delattr`` or
    ``delitem``.

    A cache is an attribute of a library's object, whose reads are not followed. Instead the step holds only where the attribute
    is what it was.

    Attributes:
        made: whether there was no entry or attribute of that key before.
        before: of a cache, the :func:`~torch_compat.step.values.marks.look` of the attribute before the step.
    """

    kind: str
    place: ObjectPath
    key: Any
    value: Any
    made: bool = False
    before: Hashable = None

    @property
    def assigns(self) -> bool:
        """Whether an attribute is set or deleted, rather than a container changed."""
        return self.kind in ("setattr", "setbuffer", "setcache", "delattr")

    def holder(self, target: Any) -> Any:
        """Find what holds the entry or attribute in ``target``, the object at its place."""
        return target._buffers if self.kind == "setbuffer" else target.__dict__ if self.assigns else target

    def apply(self, target: Any, fill: Callable[[Any], Any]) -> None:
        if self.kind == "append":
            target.append(fill(self.value))
        elif self.kind == "contents":
            replace_contents(target, fill(self.value))
        elif self.kind == "setattr":
            target.__dict__[self.key] = fill(self.value)
        elif self.kind in ("setbuffer", "setcache"):  # steps that follow may have its values as constants: read them now
            value = fill(self.value)
            self.holder(target)[self.key] = value.clone() if isinstance(value, torch.Tensor) else value
        elif self.kind == "setitem":
            target[self.key] = fill(self.value)
        elif self.kind == "delattr":
            target.__dict__.pop(self.key, None)
        else:
            target.pop(self.key, None)

    def text(self, there_before: Collection[int]) -> str:
        """The change as Python; ``there_before`` as of :func:`~torch_compat.step.effects.descriptions.describe`."""
        target = f"{self.place}.{self.key}" if self.assigns else f"{self.place}[{describe(self.key, there_before)}]"
        if self.kind.startswith("del"):
            return f"del {target}"
        value = describe(self.value, there_before, kept=True)
        if self.kind == "append":
            return f"{self.place}.append({value})"
        return f"{self.place}[:] = {value}" if self.kind == "contents" else f"{target} = {value}"


@dataclass(frozen=True)
class Effects:
    """The changes that a step makes to Python objects, in order.

    Attributes:
        records: those that are carried out after each step.
        redo: functions that put generators and arrays where one run has left them.
        refusal: why another run leaves them elsewhere, or other objects in the places; "" where it does not.
        only_once: whether what one run has left cannot be left once more.
    """

    records: tuple[Record, ...] = ()
    redo: tuple[Callable[[], None], ...] = ()
    refusal: str = ""
    only_once: bool = False

    def replay(self, roots: Mapping[str, Any], fill: Callable[[Any], Any]) -> None:
        """Carry the changes out; ``fill`` puts real values into a recorded value."""
        targets = [record.place.find(roots) for record in self.records]  # all before any: one may move what is last in a list
        for record, target in zip(self.records, targets, strict=True):
            record.apply(target, fill)

    @property
    def fill_containers(self) -> bool:
        """Whether it appends to lists or makes entries."""
        return any(record.kind == "append" or record.made or record.place.is_in_container for record in self.records)

    def depend_on(self, looked_at: Collection[str]) -> list[ObjectPath]:
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
        """The ``(owner, attribute)`` of all changes (see :meth:`ObjectPath.attribute`), or only of assignments."""
        found = [r.place.attribute(r.key if r.assigns else None) for r in self.records if r.assigns or not rebound]
        return frozenset(one for one in found if one is not None)

    def assigned_from(self, values: Collection[int]) -> frozenset[tuple[str, str]]:
        """The ``(owner, attribute)`` that are set once, to one of these values of the program, or a list or dict of them."""
        set_to = [(r.place.attribute(r.key), r.value) for r in self.records if r.kind == "setattr"]
        times = Counter(where for where, _ in set_to)
        return frozenset(where for where, value in set_to if where and times[where] == 1 and _is_made_from(values, value))

    def contained(self, values: Collection[int]) -> frozenset[int]:
        """Find those of these values of the program that are in a list, tuple or dict of nothing else that the step assigns."""
        assigned = [
            r.value for r in self.records if r.kind in ("setattr", "setitem") and isinstance(r.value, list | tuple | dict)
        ]
        made = [one for one in assigned if _is_made_from(values, one)]
        return frozenset(leaf.index for leaf in pytree.tree_leaves(made) if isinstance(leaf, ValueSlot))

    def containers(self, roots: Mapping[str, Any]) -> set[int]:
        """The ids of the containers and objects whose contents change."""
        found = set()
        for record in self.records:
            with contextlib.suppress(KeyError, IndexError):  # one that the step makes
                target = record.place.find(roots)
                found.add(id(record.holder(target)))
        return found

    def entries(self, roots: Mapping[str, Any]) -> set[tuple[int, Any]]:
        """``(id of the dict, key)`` of what is set or deleted each time: entries and attributes, not those made once."""
        found = set()
        for record in self.records:
            if record.kind not in ("append", "contents") and not record.made:
                with contextlib.suppress(KeyError, IndexError):  # one that the step makes
                    target = record.place.find(roots)
                    found.add((id(record.holder(target)), record.key))
        return found

    @functools.cached_property
    def hold_results(self) -> bool:
        """Whether a result of a host call is among the stored values."""
        leaves = [leaf for record in self.records for leaf in pytree.tree_leaves(record.value)]
        return any(isinstance(leaf, SLOTS) and leaf.source == "results" for leaf in leaves)

    @functools.cached_property
    def assume(self) -> tuple[tuple[ObjectPath, Any], ...]:
        """The assumptions about paths: ``(path, None)`` must be there; with a kind and key of a record, the entry must not."""
        found: dict[tuple[ObjectPath, Any], None] = {}
        for record in self.records:
            if record.kind == "setcache":
                found[record.place, (record.kind, record.key, record.before)] = None
            elif record.made and isinstance(record.value, _CONTAINERS):
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
            if made is not None and made[0] == "setcache":
                if look(target.__dict__.get(made[1])) != made[2]:
                    return False
            elif made is not None and made[1] in (target.__dict__ if made[0] == "setattr" else target):
                return False
        return True

    @property
    def make_containers(self) -> bool:
        """Whether a list or dict is put where there was none, which steps that follow find there."""
        return any(r.kind in ("setattr", "setitem") and isinstance(r.value, _CONTAINERS) for r in self.records)

    def fingerprint(self, there_before: Collection[int]) -> str:
        """The effects as text, which must be the same in every capture of the step; see :meth:`Record.text`."""
        return "\n".join(record.text(there_before) for record in self.records)

    def __bool__(self) -> bool:
        return bool(self.records)


class _Unlike:
    """A value that equals nothing that a step assigns."""


@contextlib.contextmanager
def forgotten(effects: Effects, roots: Mapping[str, Any]) -> Iterator[bool]:
    """Replace plain values that a step assigns each time, so that the next capture shows whether it really does.

    Yields whether there are any such entries or attributes.
    """
    taken: list[tuple[dict[Any, Any], Any, Any]] = []
    for record in effects.records:
        if record.kind in ("setattr", "setitem") and is_plain(record.value):
            target = record.place.find(roots)
            holder = target.__dict__ if record.kind == "setattr" else target
            if isinstance(holder, dict) and same(holder.get(record.key, MISSING), record.value):
                taken.append((holder, record.key, holder[record.key]))
                dict.__setitem__(holder, record.key, _Unlike())
    try:
        yield bool(taken)
    finally:
        for holder, key, value in reversed(taken):
            dict.__setitem__(holder, key, value)


def _is_made_from(values: Collection[int], recorded: Any) -> bool:
    """Whether a recorded value is one of these values of the program, or holds some and otherwise plain ones only."""
    leaves = pytree.tree_leaves(recorded)
    slots = [leaf for leaf in leaves if isinstance(leaf, ValueSlot)]
    known = all(slot.source == "values" and slot.index in values for slot in slots)
    return bool(slots) and known and all(isinstance(leaf, ValueSlot) or is_plain(leaf) for leaf in leaves)


def root_name(roots: Mapping[str, Any], text: str, value: Any) -> str:
    """The name of an object among roots: the one that it has, or ``text``, with a number where that is another's."""
    for name, one in roots.items():
        if one is value:
            return name
    name, number = text, 1
    while name in roots:
        number += 1
        name = f"{text} ({number})"
    return name


def outline(place: ObjectPath, roots: Mapping[str, Any]) -> Hashable:
    """An outline of a container that a step could see without values of tensors: its length, and plain entries."""
    try:
        found = place.find(roots, strictly=True)
    except (KeyError, IndexError, AttributeError, TypeError):
        return None
    if len(found) > policy.FEW:
        return len(found)
    return tuple(map(look, found))


def is_plain(value: Any) -> bool:
    """Whether it is None, a number or a text: of exactly these classes, whose ``==`` says all."""
    return value is None or type(value) in (bool, int, float, str)


def replace_contents(holder: Any, contents: Sequence[Any] | set[Any]) -> None:
    """Give a list, deque or set other contents; it stays the same object."""
    holder.clear()
    (holder.update if isinstance(holder, set) else holder.extend)(contents)
