"""Places of the host's state that a step has read while it ran, and how they look now."""

from __future__ import annotations

import array
import contextlib
import ctypes
import operator
import os
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from torch_compat.step.values import policy
from torch_compat.step.values.dict_contents import drop_entries, put_entries, set_entry
from torch_compat.step.values.generators import same_state, set_state, state_of
from torch_compat.step.values.marks import PLAIN, contents, holds_the_same, inside, mark, of_result, slots
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.user_objects import attributes_of
from xlatrain.bridge.tensors.live import is_live

Key = tuple[str, int, Any]
_ENTRY = 64  # bytes of an array that count as one
_FEW = 256  # bytes of a tensor
_IN_MEMORY = (memoryview, *ctypes.c_double.__bases__, ctypes.Array, ctypes.Structure, ctypes.Union)
OF_NUMBERS = (np.ndarray, np.void, array.array, *_IN_MEMORY)
"""Classes of libraries whose objects are what is in them."""
PARTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Location:
    """A place of the host's state.

    Args:
        owner: whose state it is.
        text: as a user may recognize it.

    Attributes:
        foreign: the class of an installed package's object whose place it is, or of what only its code knows; None for others.
    """

    foreign: type | None = None
    kind = ""
    name: Any = None

    def __init__(self, owner: Any, text: str) -> None:
        self.owner = owner
        self.text = text

    @property
    def key(self) -> Key:
        return (self.kind, id(self.owner), self.name)

    def value(self) -> Any:
        """The object that is there; :data:`MISSING` where a place is no place of one object."""
        return MISSING

    def now(self) -> Hashable:
        """The mark of what is there."""
        return mark(self.value())

    def keep(self) -> Any:
        """A copy from which :meth:`restore` can bring this state back."""

    def restore(self, kept: Any) -> None:
        """Bring a state back, where that is possible."""


class Named(Location):
    """A place that an owner has by a name.

    Args:
        owner, text: see :class:`Location`.
        name: the key, index or attribute.
    """

    def __init__(self, owner: Any, name: Any, text: str) -> None:
        super().__init__(owner, text)
        self.name = name


class Entry(Named):
    """``holder[name]`` of a dict: a variable, an attribute, an entry."""

    kind = "entry"

    def value(self) -> Any:
        return dict.get(self.owner, self.name, MISSING) if isinstance(self.owner, dict) else self.owner.get(self.name, MISSING)

    def keep(self) -> Any:
        return self.value()

    def restore(self, kept: Any) -> None:
        if not isinstance(self.owner, dict):
            return
        if kept is not MISSING:
            set_entry(self.owner, self.name, kept)
        elif self.name in dict.keys(self.owner):
            drop_entries(self.owner, [self.name])


class Item(Named):
    """``holder[index]`` of a list or deque."""

    kind = "item"

    def value(self) -> Any:
        try:
            return self.owner[self.name]
        except IndexError:
            return MISSING


class Contents(Location):
    """All that an object holds itself."""

    kind = "contents"

    def value(self) -> Any:
        return self.owner

    def now(self) -> Hashable:
        return contents(self.owner)

    def keep(self) -> Any:
        return (_copy(self.owner), dict(attributes_of(self.owner) or {}), _in_slots(self.owner))

    def restore(self, kept: Any) -> None:
        copy, attributes, in_slots = kept
        if copy is not None and not isinstance(self.owner, tuple):
            put_back(self.owner, copy)
        if (held := attributes_of(self.owner)) is not None:
            put_back(held, attributes)
        for name, value in in_slots.items():
            if getattr(self.owner, name, MISSING) is not value:
                setattr(self.owner, name, value)


def _in_slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in slots(type(value)) if hasattr(value, name)}


class Large(Contents):
    """All below a container or array that has many entries, which are compared now and then only.

    Args:
        whole: whether what the entries hold counts, too.
    """

    def __init__(self, owner: Any, text: str, *, whole: bool = True) -> None:
        super().__init__(owner, text)
        self._pairs: list[tuple[Any, Any]] = []
        self._generation = 0
        self.size = 0
        self._add(owner, {id(owner)} if whole else None, 0)

    def _add(self, holder: Any, known: set[int] | None, depth: int) -> None:
        self._pairs.append((holder, _copy(holder)))
        self.size += entries_of(holder)
        if known is None or isinstance(holder, np.ndarray) or depth == policy.DEPTH:
            return
        for one in inside(holder):
            if self.size > policy.MOST:
                return
            if isinstance(one, PLAIN) or id(one) in known:
                continue
            held = one if isinstance(one, dict | list | tuple | set | deque | np.ndarray) else attributes_of(one)
            if held is not None and not isinstance(one, torch.nn.Module | torch.Tensor | type | types.ModuleType):
                known.add(id(one))
                self._add(held, known, depth + 1)

    @property
    def every(self) -> int:
        """The number of looks for each comparison of all entries; another length is seen at each."""
        return max(1, self.size // policy.MOST)

    def differs(self, look: int) -> bool:
        """Whether anything was found to have changed, at this look of many."""
        return self.has_other_length or (look % self.every == 0 and not all(map(holds_the_same, *zip(*self._pairs, strict=True))))

    @property
    def has_other_length(self) -> bool:
        return len(self._pairs[0][0]) != len(self._pairs[0][1])

    def now(self) -> Hashable:
        if self.differs(0):
            self._generation += 1
            self._pairs = [(held, copy if holds_the_same(held, copy) else _copy(held)) for held, copy in self._pairs]
        return self._generation

    def keep(self) -> Any:
        return [copy for _, copy in self._pairs]

    def restore(self, kept: Any) -> None:
        for (held, _), copy in zip(self._pairs, kept, strict=True):
            if not isinstance(held, tuple):
                put_back(held, copy)


def entries_of(holder: Any) -> int:
    """The number of entries of a container, or of what would take as long to compare in an array."""
    return holder.nbytes // _ENTRY if isinstance(holder, np.ndarray) else len(holder)


def _copy(holder: Any) -> Any:
    if isinstance(holder, array.array):
        return holder[:]
    if isinstance(holder, _IN_MEMORY):
        return memoryview(holder).tobytes()
    if isinstance(holder, OrderedDict):  # which dict.copy would not see in its order
        return dict(OrderedDict.items(holder))
    kinds: tuple[Any, ...] = (dict, list, set, deque, bytearray, np.ndarray, np.void)
    found = next((kind.copy(holder) for kind in kinds if isinstance(holder, kind)), None)  # a subclass's may differ
    return holder if isinstance(holder, tuple) else found


def put_back(holder: Any, copy: Any) -> None:
    """Give a container or array the contents that its copy has."""
    if isinstance(holder, np.ndarray):
        with contextlib.suppress(ValueError):  # read-only
            holder[...] = copy
    elif isinstance(holder, list | bytearray | array.array):
        holder[:] = copy
    elif isinstance(holder, _IN_MEMORY):
        with contextlib.suppress(TypeError, ValueError):  # read-only, or not in one piece
            memoryview(holder).cast("B")[:] = copy
    elif isinstance(holder, dict):
        put_entries(holder, copy)
    elif isinstance(holder, np.void):
        for name in holder.dtype.names or ():
            holder[name] = copy[name]
    else:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(copy)


class Stream(Location):
    """The position of a random generator or a file, which a step may not move."""

    kind = "stream"

    def now(self) -> Hashable:
        return _Position(state_of(self.owner))

    def keep(self) -> Any:
        return state_of(self.owner)

    def restore(self, kept: Any) -> None:
        set_state(self.owner, kept)


class _Position:
    """Equal where a generator would go on with the same."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Position) and same_state(self.state, other.state)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Attribute(Named):
    """``owner.name``, asked for: what is computed by code that is not Python's, or not the user's."""

    kind = "attribute"

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


class Lookup(Named):
    """Where ``owner.name`` is found: in the object, or in which of its classes."""

    kind = "lookup"

    def value(self) -> Any:
        return static_lookup(self.owner, self.name)

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
        return tuple(map(mark, PARTS(self.owner)))


class Variable(Location):
    """A variable of the function around another."""

    kind = "variable"

    def value(self) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:
            return MISSING

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

    def keep(self) -> Any:
        return type(self.owner)

    def restore(self, kept: Any) -> None:
        if type(self.owner) is not kept:
            self.owner.__class__ = kept


class Member(Named):
    """Whether something is in a dict or set."""

    kind = "member"

    def now(self) -> Hashable:
        return self.name in self.owner


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
        if is_live(self.owner):  # an input of programs since it was met
            return None
        return (self.owner._version, tuple(self.owner.shape), str(self.owner.dtype), self.keep())

    def keep(self) -> bytes:
        """The values, of a tensor that is compared by them; nothing of others."""
        tensor = self.owner
        size = tensor.numel() * tensor.element_size()
        # Of a storage that may not be resized, another (an array of NumPy's) may write to the memory, past the version.
        most = _FEW if tensor.untyped_storage().resizable() else policy.BYTES
        small = 0 < size <= most and tensor.is_contiguous() and tensor.device.type == "cpu"
        return ctypes.string_at(tensor.data_ptr(), size) if small else b""  # without an op, which a capture would see

    def restore(self, kept: Any) -> None:
        if len(kept) == self.owner.numel() * self.owner.element_size():
            ctypes.memmove(self.owner.data_ptr(), kept, len(kept))


def is_memory(descriptor: Any) -> bool:
    """Whether a descriptor is a slot, or a field of C's: what it gives is what was put there.

    A setting of torch (``torch.backends.cuda.matmul.allow_tf32``) may be another while a step is captured, and must not be put
    back after.
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


def text_of(owner: Any, name: str) -> str:
    """``owner.name`` as a user may recognize it."""
    named = isinstance(owner, type | types.FunctionType)
    return f"{owner.__qualname__ if named else type(owner).__qualname__}.{name}"


def is_variable(place: Location) -> bool:
    """Whether a name leads to it: a global, a variable of a function around, an attribute of a class."""
    if isinstance(place, Entry):
        return isinstance(place.owner, dict) and "__name__" in place.owner
    return isinstance(place, Variable) or (isinstance(place, Lookup) and isinstance(place.owner, type))
