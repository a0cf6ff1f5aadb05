"""Places of the host's state that a step has read while it ran, and how they look now."""

from __future__ import annotations

import array
import contextlib
import ctypes
import itertools
import operator
import os
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, MutableMapping
from typing import Any

import numpy as np
import torch

from torch_compat.step.guards.identity_check import IdentityCheck
from torch_compat.step.values.marks import contents, holds_the_same, mark, of_result
from torch_compat.step.values.names import MISSING

Key = tuple[str, int, Any]
_FEW = 256  # bytes of a tensor
_SHARED = 1 << 22  # of one that shares its memory
_IN_MEMORY = (np.ndarray, memoryview, *ctypes.c_double.__bases__, ctypes.Array, ctypes.Structure, ctypes.Union)
_PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Location:
    """A place of the host's state.

    Args:
        owner: whose state it is.
        text: as a user may recognize it.
    """

    kind = ""
    name: Any = None

    def __init__(self, owner: Any, text: str) -> None:
        self.owner = owner
        self.text = text

    @property
    def key(self) -> Key:
        return (self.kind, id(self.owner), self.name)

    def now(self) -> Hashable:
        """The mark of what is there."""
        raise NotImplementedError

    def keep(self) -> Any:
        """A copy from which :meth:`restore` can bring this state back."""

    def restore(self, kept: Any) -> None:
        """Bring a state back, where that is possible."""


class Entry(Location):
    """``holder[name]`` of a dict: a variable, an attribute, an entry."""

    kind = "entry"

    def __init__(self, owner: MutableMapping[Any, Any], name: Any, text: str) -> None:
        super().__init__(owner, text)
        self.name = name

    def value(self) -> Any:
        return dict.get(self.owner, self.name, MISSING) if isinstance(self.owner, dict) else self.owner.get(self.name, MISSING)

    def now(self) -> Hashable:
        return mark(self.value())

    def keep(self) -> Any:
        return self.value()

    def restore(self, kept: Any) -> None:
        if not isinstance(self.owner, dict):
            return
        if kept is MISSING:
            dict.pop(self.owner, self.name, None)
        else:
            dict.__setitem__(self.owner, self.name, kept)


class Item(Location):
    """``holder[index]`` of a list or deque."""

    kind = "item"

    def __init__(self, owner: Any, name: int, text: str) -> None:
        super().__init__(owner, text)
        self.name = name

    def now(self) -> Hashable:
        try:
            return mark(self.owner[self.name])
        except IndexError:
            return "no such entry"


class Contents(Location):
    """All that an object holds itself."""

    kind = "contents"

    def now(self) -> Hashable:
        return contents(self.owner)

    def keep(self) -> Any:
        if isinstance(self.owner, array.array):
            return self.owner[:]
        if isinstance(self.owner, _IN_MEMORY):
            return memoryview(self.owner).tobytes()
        kinds: tuple[Any, ...] = (dict, list, set, deque, bytearray)
        return next((kind.copy(self.owner) for kind in kinds if isinstance(self.owner, kind)), None)  # a subclass's may differ

    def restore(self, kept: Any) -> None:
        if kept is None:
            return
        if isinstance(self.owner, list | bytearray | array.array):
            self.owner[:] = kept
            return
        if isinstance(self.owner, _IN_MEMORY):
            with contextlib.suppress(TypeError, ValueError):  # read-only, or not in one piece
                memoryview(self.owner).cast("B")[:] = kept
            return
        self.owner.clear()
        if isinstance(self.owner, dict):
            dict.update(self.owner, kept)
        else:
            (self.owner.update if isinstance(self.owner, set) else self.owner.extend)(kept)


class Attribute(Location):
    """``owner.name``, asked for: what is computed by code that is not Python's, or not the user's."""

    kind = "attribute"

    def __init__(self, owner: Any, name: str, text: str) -> None:
        super().__init__(owner, text)
        self.name = name

    def now(self) -> Hashable:
        try:
            return mark(getattr(self.owner, self.name))
        except Exception as error:
            return type(error).__name__

    def keep(self) -> Any:
        if isinstance(self.owner, torch.Tensor) or not is_memory(static_lookup(type(self.owner), self.name)):
            return MISSING
        return getattr(self.owner, self.name, MISSING)

    def restore(self, kept: Any) -> None:
        if kept is not MISSING:
            with contextlib.suppress(AttributeError, TypeError):  # what is computed cannot be set
                setattr(self.owner, self.name, kept)


class Lookup(Location):
    """Where ``owner.name`` is found: in the object, or in which of its classes."""

    kind = "lookup"

    def __init__(self, owner: Any, name: str, text: str) -> None:
        super().__init__(owner, text)
        self.name = name

    def now(self) -> Hashable:
        return mark(static_lookup(self.owner, self.name))

    def keep(self) -> Any:
        return next(((kind, kind.__dict__[self.name]) for kind in self._classes() if self.name in kind.__dict__), None)

    def _classes(self) -> tuple[type, ...]:
        above: tuple[type, ...] = getattr(type(self.owner), "__mro__", ())
        return (*self.owner.__mro__, *above) if isinstance(self.owner, type) else above

    def restore(self, kept: Any) -> None:
        kind, value = (None, MISSING) if kept is None else kept
        if isinstance(self.owner, type) and self.owner is not kind and self.name in vars(self.owner):
            type.__delattr__(self.owner, self.name)  # past a metaclass of the user's
        if kind is not None and kind.__dict__.get(self.name, MISSING) is not value:
            with contextlib.suppress(TypeError):  # classes in C
                type.__setattr__(kind, self.name, value)


class Function(Location):
    """A function's code and defaults; what is in the defaults are places of their own."""

    kind = "function"

    def now(self) -> Hashable:
        return tuple(map(mark, _PARTS(self.owner)))


class Variable(Location):
    """A variable of the function around another."""

    kind = "variable"

    def value(self) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:
            return MISSING

    def now(self) -> Hashable:
        return mark(self.value())

    def keep(self) -> Any:
        return self.value()

    def restore(self, kept: Any) -> None:
        if kept is not MISSING:
            self.owner.cell_contents = kept


class Kind(Location):
    """An object's class, which may be replaced."""

    kind = "kind"

    def now(self) -> Hashable:
        return mark(type(self.owner))


class Member(Location):
    """Whether something is in a dict or set."""

    kind = "member"

    def __init__(self, owner: Any, name: Any, text: str) -> None:
        super().__init__(owner, text)
        self.name = name

    def now(self) -> Hashable:
        return self.name in self.owner


class Large(Location):
    """The entries of a container that has many."""

    kind = "large"

    def __init__(self, owner: Any, text: str) -> None:
        super().__init__(owner, text)
        self._copy = owner.copy() if hasattr(owner, "copy") else owner
        self._generation = 0

    def now(self) -> Hashable:
        if not holds_the_same(self.owner, self._copy):
            self._copy = self.owner.copy()
            self._generation += 1
        return self._generation


class Result(Location):
    """The answer of a function, written in C or in a library, that is asked for a setting: it is asked again.

    Args:
        function: has no effects.
        args: numbers and texts.
    """

    kind = "result"

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], text: str) -> None:
        held_by = getattr(function, "__self__", None)
        super().__init__(function if held_by is None or isinstance(held_by, types.ModuleType) else held_by, text)
        self._function = function
        self._args = args
        self.name = (getattr(function, "__name__", ""), args)

    def now(self) -> Hashable:
        return of_result(self._function(*self._args))


class Opaque(Location):
    """An object of C code, of which it is not known what it holds."""

    kind = "opaque"

    def now(self) -> Hashable:
        return None


class Ambient(Location):
    """A setting of the process, as a function without arguments gives it."""

    kind = "ambient"

    def now(self) -> Hashable:
        return mark(self.owner())


class File(Location):
    """A file or folder that is read: its times and size."""

    kind = "file"

    def __init__(self, owner: str, text: str) -> None:
        super().__init__(owner, text)
        self.name = owner

    @property
    def key(self) -> Key:
        return (self.kind, 0, self.name)

    def now(self) -> Hashable:
        try:
            found = os.stat(self.owner)
        except OSError as error:
            return type(error).__name__
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


class Values(Location):
    """The values of a tensor of the host."""

    kind = "values"

    def now(self) -> Hashable:
        tensor = self.owner
        size = tensor.numel() * tensor.element_size()
        # Of a storage that may not be resized, another (an array of NumPy's) may write to the memory, past the version.
        most = _FEW if tensor.untyped_storage().resizable() else _SHARED
        small = 0 < size <= most and tensor.is_contiguous() and tensor.device.type == "cpu"
        values = ctypes.string_at(tensor.data_ptr(), size) if small else b""  # without an op, which a capture would see
        return (tensor._version, tuple(tensor.shape), str(tensor.dtype), values)


def is_memory(descriptor: Any) -> bool:
    """Whether a descriptor is a slot, or a field of C's: what it gives is what was put there.

    A setting of torch (``torch.backends.mkldnn.enabled``) is another while a step is captured, and must not be put back after.
    """
    kind = type(descriptor)
    return kind is types.MemberDescriptorType or kind is types.GetSetDescriptorType or kind.__module__ == "_ctypes"


def static_lookup(owner: Any, name: str) -> Any:
    """The object that ``owner.name`` leads to, before descriptors are asked."""
    if isinstance(owner, type):
        for kind in owner.__mro__:
            if name in kind.__dict__:
                return kind.__dict__[name]
    else:
        with contextlib.suppress(AttributeError, TypeError):
            held = object.__getattribute__(owner, "__dict__")
            if name in held:
                return held[name]
    kinds: tuple[type, ...] = getattr(type(owner), "__mro__", ())
    return next((kind.__dict__[name] for kind in kinds if name in kind.__dict__), MISSING)


class Locations:
    """Places, and how they looked: whether they look otherwise now costs little."""

    def __init__(self, found: Iterable[Location]) -> None:
        self.marks = [(one, one.now()) for one in found]
        self._entries = [pair for pair in self.marks if isinstance(pair[0], Entry) and pair[0].value() is not MISSING]
        self._functions = [one.owner for one, _ in self.marks if isinstance(one, Function)]
        self._parts = list(itertools.chain.from_iterable(map(_PARTS, self._functions)))
        self._objects = [one.owner for one, _ in self.marks if isinstance(one, Kind)]
        self._kinds = list(map(type, self._objects))
        held = {id(one) for one, _ in self._entries}
        apart = (Function, Kind, Opaque)
        self._others = [pair for pair in self.marks if id(pair[0]) not in held and not isinstance(pair[0], apart)]
        self._hold()

    def _hold(self) -> None:
        holders: dict[int, tuple[Any, dict[str, Any]]] = {}
        for one, _ in self._entries:
            assert isinstance(one, Entry)
            holders.setdefault(id(one.owner), (one.owner, {}))[1][one.name] = one.value()
        self._held = IdentityCheck((holder, values, True) for holder, values in holders.values())

    def changed(self) -> bool:
        if self._held.changed():
            if any(one.now() != before for one, before in self._entries):
                return True
            self._hold()
        if not all(map(operator.is_, itertools.chain.from_iterable(map(_PARTS, self._functions)), self._parts)):
            return True
        if not all(map(operator.is_, map(type, self._objects), self._kinds)):
            return True
        for one, before in self._others:  # noqa: SIM110 (a generator costs more)
            if one.now() != before:
                return True
        return False

    def parts(self) -> dict[str, Hashable]:
        """The marks, by the text of their place."""
        found: dict[str, list[Hashable]] = {}
        for one, now in self.marks:
            found.setdefault(one.text, []).append((*one.key, now))
        return {text: tuple(parts) for text, parts in found.items()}
