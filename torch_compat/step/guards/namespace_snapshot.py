"""Snapshots of everything that a step reads outside of its module: names, contents of containers, of objects and of arrays."""

from __future__ import annotations

import functools
import logging
import os
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from torch_compat.step.guards.identity_check import IdentityCheck
from torch_compat.step.guards.locations import Locations
from torch_compat.step.values.marks import PLAIN, has_contents, holds_the_same, same
from torch_compat.step.values.names import MISSING, Name
from torch_compat.step.values.user_objects import attributes_of, is_user_class, is_user_object

_DEPTH = 8
LARGE = 1000  # entries: more are compared now and then only
_OFTEN = 250  # entries that are compared at each look, on an average
_MOST = 100_000  # entries below a container: more are data
_ENTRY = 64  # bytes of an array that count as one
_OPAQUE = (
    *(torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader),
    *(type, types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType, functools.partial),
    *(logging.Logger, logging.Handler, logging.LoggerAdapter, BaseException, Enum),
)
_DICTS = (dict, types.MappingProxyType)
_NOT_FOREIGN = frozenset(
    {"torch_compat", "xlatrain", "torch", "jax", "jaxlib", "numpy", "typing", "threading", "builtins", "functools"}
)


@dataclass
class LargeObject:
    """An object of an installed package, or a container or array that is too large to be compared before every step.

    Attributes:
        text: the name that leads to the object.
        kind: the class of an installed package's object; None for containers and arrays.
        pairs: the containers in the object, the object's own first, each with a copy.
        size: number of entries.
        generation: a number that changes with the contents.
    """

    text: str
    kind: type | None
    pairs: list[tuple[Any, Any]]
    size: int
    generation: int = 0

    @classmethod
    def of(cls, text: str, value: Any, holder: Any, known: set[int]) -> LargeObject:
        found = cls(text, None if holder is value else type(value), [], 0)
        found._add(holder, known, 0)
        return found

    def _add(self, holder: Any, known: set[int], depth: int) -> None:
        self.pairs.append((holder, holder.copy()))
        self.size += holder.nbytes // _ENTRY if isinstance(holder, np.ndarray) else len(holder)
        if isinstance(holder, np.ndarray) or depth >= _DEPTH:
            return
        for item in holder.values() if isinstance(holder, Mapping) else holder:
            if self.size > _MOST:
                return
            if isinstance(item, PLAIN) or id(item) in known:
                continue
            inner = item if isinstance(item, np.ndarray) else holder_of(item) or foreign_contents(item)
            if inner is not None and not isinstance(inner, frozenset):
                known.add(id(item))
                self._add(inner, known, depth + 1)

    @property
    def key(self) -> tuple[str, int]:
        return self.text, id(self.pairs[0][0])

    @functools.cached_property
    def every(self) -> int:
        """The number of refreshes for each comparison of the contents; another length is seen at each."""
        return self.size // _OFTEN if self.size > LARGE else 1

    def changed(self, refresh: int) -> bool:
        holder, copy = self.pairs[0]
        return len(holder) != len(copy) or (refresh % self.every == 0 and self.differs())

    def differs(self) -> bool:
        """Whether any contents have changed."""
        return not all(holds_the_same(*pair) for pair in self.pairs)

    def equals(self, other: LargeObject) -> bool:
        """Whether the same holders held the same."""
        return len(self.pairs) == len(other.pairs) and all(
            a is b and holds_the_same(one, two) for (a, one), (b, two) in zip(self.pairs, other.pairs, strict=True)
        )


@dataclass
class NamespaceSnapshot:
    """A snapshot of the namespaces around a step.

    Attributes:
        names: the names, with their values.
        contents: containers, and attributes of the user's objects: the text of the name that leads there, the holder, a copy.
        arrays: small arrays: the text of the name, the array, a copy.
        wholes: large objects, each compared as a whole.
        structure: the structure of the module tree.
        classes: classes whose further attributes would hide those of their bases.
        late: a large object that was found to have changed some refreshes ago.
        recorded: the places that the step has read while it ran, as far as they are not among the others.
    """

    names: list[tuple[Name, Any]] = field(default_factory=list)
    contents: list[tuple[str, Any, Any]] = field(default_factory=list)
    arrays: list[tuple[str, np.ndarray, np.ndarray]] = field(default_factory=list)
    wholes: list[LargeObject] = field(default_factory=list)
    structure: Hashable = ()
    classes: list[type] = field(default_factory=list)
    late: LargeObject | None = None
    recorded: Locations = field(default_factory=lambda: Locations(()))
    _looks: int = 0
    _held: IdentityCheck = field(default_factory=lambda: IdentityCheck(()))

    def add(
        self,
        text: str,
        value: Any,
        skipped: Collection[int | str],
        known: set[int],
        *,
        depth: int = 0,
        guarded: int = 0,
    ) -> None:
        """Take in what a value holds.

        Args:
            skipped: ids of containers, and names, that are not to be followed.
            known: ids of what has been taken in.
            guarded: to what depth others follow the contents of containers and of objects with ``__dict__``.
        """
        if isinstance(value, PLAIN) or id(value) in known or depth > _DEPTH:
            return
        known.add(id(value))
        if isinstance(value, np.ndarray):
            if value.nbytes <= LARGE * _ENTRY:
                self.arrays.append((text, value, value.copy()))
            else:
                self.wholes.append(LargeObject.of(text, value, value, known))
            return
        holder = holder_of(value)
        if holder is None and (holder := foreign_contents(value)) is not None and depth >= guarded:
            if text not in skipped and id(holder) not in skipped:
                self.wholes.append(LargeObject.of(text, value, holder, known))
            return
        if holder is None or id(holder) in skipped:
            return
        if len(holder) > LARGE:
            self.wholes.append(LargeObject.of(text, holder, holder, known))
            return
        if isinstance(holder, _Slots | _Tuple):
            guarded = 0
        if depth >= guarded and not isinstance(holder, _Tuple):
            self.contents.append((text, holder, holder.copy()))
        for item in holder.values() if isinstance(holder, Mapping) else holder:
            self.add(text, item, skipped, known, depth=depth + 1, guarded=guarded)

    def changed(self) -> bool:
        """Whether anything differs from the snapshot. Cheap: called before every step."""
        for get, name, before in self._gets:
            now = get(name, MISSING)
            if now is not before and not same(now, before):
                return True
        if self._held.changed() or self.recorded.changed():
            return True
        for _, holder, copy in self.contents:
            if not holds_the_same(holder, copy):
                return True
        for array, copy in self._arrays:
            if not holds_the_same(array, copy):
                return True
        return bool(self.wholes) and self._whole_changed()

    def _whole_changed(self) -> bool:
        self._looks += 1
        for whole in self.wholes:
            if whole.changed(self._looks):
                self.late = whole if whole.every > 1 and len(whole.pairs[0][0]) == len(whole.pairs[0][1]) else None
                return True
        return False

    @functools.cached_property
    def _gets(self) -> list[tuple[Callable[..., Any], str, Any]]:
        return [(name.holder.get, name.name, value) for name, value in self.names if not _is_fixed(name, value)]

    def hold(self) -> None:
        """Complete the snapshot. A value that is never equal to another, most of all a function, is compared by its holder."""
        found: dict[int, tuple[Any, dict[str, Any]]] = {id(kind): (vars(kind), {}) for kind in self.classes}
        for name, value in self.names:
            if _is_fixed(name, value):
                holder = name.holder if name.owner is None else name.owner
                found.setdefault(id(holder), (name.holder, {}))[1][name.name] = value
        self._held = IdentityCheck((holder, values, type(holder) is dict) for holder, values in found.values())

    @functools.cached_property
    def _arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(array, copy) for _, array, copy in self.arrays]

    def rebound(self) -> list[tuple[Name, Any]]:
        """The names that have another value now, with their values of before."""
        return [
            (name, before)
            for name, before in self.names
            if (now := name.holder.get(name.name, MISSING)) is not before and not same(now, before)
        ]

    def mutated(self) -> Iterator[str]:
        """Put contents that have changed back, and yield the names that lead to them."""
        pairs = [(text, holder, copy) for text, holder, copy in (*self.contents, *self.arrays)]
        pairs += [(whole.text, *pair) for whole in self.wholes for pair in whole.pairs]
        for text, holder, copy in pairs:
            if not holds_the_same(holder, copy):
                restore(holder, copy)
                yield text

    def value(self, text: str) -> Any:
        """The value that the name stood for."""
        return next(value for name, value in self.names if name.text == text)

    def parts(self) -> dict[str, Hashable]:
        """The values that are compared, by the text of their names."""
        found: dict[str, list[Hashable]] = {}
        for name, value in self.names:
            found.setdefault(name.text, []).append(_shallow(value))
        for text, _, copy in self.contents:
            items = copy.items() if isinstance(copy, dict) else enumerate(copy)
            found.setdefault(text, []).append(tuple((repr(key), _shallow(item)) for key, item in items))
        for text, _, copy in self.arrays:
            found.setdefault(text, []).append((str(copy.dtype), copy.shape, copy.tobytes()))
        for whole in self.wholes:
            found.setdefault(whole.text, []).append((*whole.key, whole.generation))
        for text, parts in self.recorded.parts().items():
            found.setdefault(text, []).append(parts)
        return {"the module's structure": self.structure, **{text: tuple(parts) for text, parts in found.items()}}

    def tensors(self) -> Hashable:
        """The part of the snapshot that two compared runs of a step do not show, since they see shapes only."""
        opaque = [(name.text, id(value)) for name, value in self.names if isinstance(value, (torch.Tensor, torch.nn.Module))]
        large = [(whole.key, whole.generation) for whole in self.wholes if isinstance(whole.pairs[0][0], np.ndarray)]
        return self.structure, tuple(opaque), tuple((text, copy.tobytes()) for text, _, copy in self.arrays), tuple(large)


def _is_fixed(name: Name, value: Any) -> bool:
    return type(name.holder) in _DICTS and value is not MISSING and not isinstance(value, PLAIN)


def holder_of(value: Any) -> Any:
    """The container in which the contents of ``value`` are; None where there are none to look at."""
    if isinstance(value, dict | list | set | deque):
        return value
    if isinstance(value, tuple):
        return _Tuple(value)
    if value is os.environ:
        return value._data
    if is_user_object(value) and not isinstance(value, torch.nn.Module):
        return value.__dict__
    slots = tuple(name for kind in type(value).__mro__ for name in _slots(kind))
    return _Slots(value, slots) if slots else None


def compares_contents(value: Any) -> bool:
    """Whether a :class:`NamespaceSnapshot` that has taken ``value`` in compares all that it holds."""
    return type(value) in (dict, list, set, deque, np.ndarray) or (is_user_object(value) and not has_contents(type(value)))


def is_large(value: Any) -> bool:
    """Whether a container or array is compared now and then only, as far as a :class:`NamespaceSnapshot` does it."""
    if isinstance(value, np.ndarray):
        return value.nbytes > LARGE * _ENTRY
    return isinstance(value, list | tuple | dict | set | deque) and len(value) > LARGE


def foreign_contents(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of an installed package: a configuration, a meter, a scaler."""
    kind = type(value)
    if isinstance(value, _OPAQUE) or kind.__module__.partition(".")[0] in _NOT_FOREIGN:
        return None
    return attributes_of(value)


def _slots(kind: type) -> tuple[str, ...]:
    """The slots of a class of the user's."""
    names = kind.__dict__.get("__slots__", ()) if is_user_class(kind) else ()
    return (names,) if isinstance(names, str) else tuple(name for name in names if not name.startswith("__"))


class _Tuple(tuple[Any, ...]):
    """A tuple as a container: it does not change, but its items may."""

    __slots__ = ()

    def copy(self) -> _Tuple:
        return self


class _Slots(Mapping[str, Any]):
    """The attributes of an object without ``__dict__``."""

    def __init__(self, owner: Any, slots: tuple[str, ...]) -> None:
        self.owner = owner
        self._names = slots

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner, name, MISSING)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def copy(self) -> dict[str, Any]:
        return dict(self)


def restore(holder: Any, copy: Any) -> None:
    """Give a container the contents that its copy has."""
    if isinstance(holder, np.ndarray):
        holder[...] = copy
    elif isinstance(holder, _Slots):
        for name, value in copy.items():
            if value is not MISSING:
                setattr(holder.owner, name, value)
    elif isinstance(holder, dict):
        for key in [key for key in holder if key not in copy]:
            dict.__delitem__(holder, key)
        dict.update(holder, copy)  # a Counter's own update adds
    elif not isinstance(holder, _Tuple):
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(copy)


def _shallow(value: Any) -> Hashable:
    if isinstance(value, PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, dict | list | set | deque):
        return (type(value).__name__, id(value))
    return ("function", value.__code__) if isinstance(value, types.FunctionType) else ("object", id(value))
