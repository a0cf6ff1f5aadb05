"""Marks of values, to compare them with what they were: where marks are equal, Python cannot tell the values apart.

Whether something is as it was before is asked here alone: :func:`same` of two values, :func:`holds_the_same` of a container or
array and its copy, :func:`mark` and :func:`contents` where the mark is what is kept.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import decimal
import functools
import io
import logging
import operator
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from torch_compat.step.values import policy
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.user_objects import attributes_of

_EQUAL = (torch.Size, torch.dtype, torch.device, torch.layout, np.dtype, range, slice)
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
"""Classes whose objects are compared by value: Python may make another object of an equal one."""
_PLAIN = frozenset({bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented)})
_VIEWS = type({}.keys()) | type({}.values())
_FEW = 100  # entries of a result
_SIMPLE = ctypes.c_double.__bases__
_Lock = type(threading.Lock())
_RLock = type(threading.RLock())


class Same:
    """Equal where it is the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__qualname__}"


def mark(value: Any) -> Hashable:
    """The mark of a value that is held somewhere: numbers and texts by value, type and sign; objects by which one it is."""
    kind = type(value)  # not its __class__: what stands for a number of the step passes for one
    if kind in _PLAIN:
        return (kind.__name__, value)
    if kind is float or kind is complex:
        return (kind.__name__, repr(value))
    if kind is tuple and len(value) <= 64:
        return ("tuple", tuple(map(mark, value)))
    if issubclass(kind, np.generic):
        return (str(value.dtype), value.tobytes())
    if issubclass(kind, _EQUAL):
        return (kind.__name__, repr(value))
    if kind is types.MethodType:
        return ("method", id(value.__func__), Same(value.__self__))
    return Same(value)


def same(now: Any, before: Any) -> bool:
    """Whether a value is the one of before: the same object, or an equal one of :data:`PLAIN`."""
    return now is before or (issubclass(type(now), PLAIN) and mark(now) == mark(before))


def look(value: Any) -> Hashable:
    """The mark of what a branch may depend on where values of tensors are not to be had: of other objects, their type."""
    return mark(value) if isinstance(value, PLAIN) else torch.Tensor if isinstance(value, torch.Tensor) else type(value)


def _pairs(items: Any) -> Hashable:
    return tuple((mark(key), mark(value)) for key, value in items)


def _of_text(stream: Any) -> Hashable:
    return "closed" if stream.closed else (stream.getvalue(), stream.tell())


def _of_logger(logger: logging.Logger) -> Hashable:
    found: list[Hashable] = [logger.manager.disable]
    above: Any = logger
    while above is not None:
        found.append((above.level, above.disabled, above.propagate, len(above.handlers)))
        above = above.parent
    return tuple(found)


def _of_partial(made: functools.partial[Any]) -> Hashable:
    return (Same(made.func), tuple(map(mark, made.args)), _pairs(made.keywords.items()))


def _of_array(held: np.ndarray) -> Hashable:
    if held.dtype.hasobject:
        return (str(held.dtype), held.shape, tuple(map(mark, held.ravel().tolist())))
    if held.nbytes > policy.BYTES:
        return (id(held), held.shape, str(held.dtype))
    return (str(held.dtype), held.shape, held.tobytes())


_CONTENTS: tuple[tuple[Any, Callable[[Any], Hashable]], ...] = (
    (collections.OrderedDict, lambda held: _pairs(held.items())),
    (dict, lambda held: _pairs(dict.items(held))),
    ((list, collections.deque), lambda held: tuple(map(mark, held))),
    (tuple, lambda held: tuple(map(mark, held))),
    ((set, frozenset), lambda held: frozenset(map(mark, held))),
    ((type({}.keys()), type({}.values())), lambda held: tuple(map(mark, held))),
    (type({}.items()), lambda held: _pairs(held)),
    (types.MappingProxyType, lambda held: _pairs(held.items())),
    (bytearray, bytes),
    (array.array, lambda held: (held.typecode, held.tobytes())),
    (memoryview, lambda held: held.tobytes()),
    ((io.StringIO, io.BytesIO), _of_text),
    (contextvars.ContextVar, lambda held: mark(held.get(MISSING))),
    (weakref.ref, lambda held: None if (now := held()) is None else id(now)),
    (threading.local, lambda held: _pairs(held.__dict__.items())),
    ((*_SIMPLE, ctypes.Array, ctypes.Structure, ctypes.Union), bytes),
    ((_Lock,), lambda held: held.locked()),
    (_RLock, repr),
    (decimal.Context, repr),
    (np.ndarray, _of_array),
    (np.void, lambda held: (str(held.dtype), held.tobytes())),
    (functools.partial, _of_partial),
    (functools._lru_cache_wrapper, lambda held: held.cache_info()[1:]),
    (logging.Logger, _of_logger),
    (BaseException, lambda held: tuple(map(mark, held.args))),
)
"""Classes, and what their objects hold besides attributes."""


@functools.lru_cache(maxsize=4096)
def _contents_of(kind: type) -> Callable[[Any], Hashable] | None:
    return next((function for kinds, function in _CONTENTS if issubclass(kind, kinds)), None)


def has_contents(kind: type) -> bool:
    """Whether objects of this class hold something besides their attributes, of which :func:`contents` knows."""
    return _contents_of(kind) is not None


def contents(value: Any) -> Hashable:
    """The contents of an object that can change: entries, attributes, what is written in it; each as its :func:`mark`."""
    own = _contents_of(type(value))
    found = None if own is None else own(value)
    if own is not None and isinstance(value, logging.Logger | threading.local):
        return found
    attributes = attributes_of(value)
    held = _pairs(attributes.items()) if attributes else ()
    return (found, held, tuple((name, mark(getattr(value, name, MISSING))) for name in slots(type(value))))


def inside(value: Any) -> Iterator[Any]:
    """The objects that an object holds: entries and attributes."""
    if issubclass(type(value), dict | types.MappingProxyType):
        yield from list(value.values())
    elif issubclass(type(value), list | tuple | set | frozenset | collections.deque | _VIEWS):
        yield from list(value)
    elif issubclass(type(value), functools.partial):
        yield from (*value.args, *value.keywords.values())
    elif issubclass(type(value), contextvars.ContextVar):
        yield value.get(None)
    elif issubclass(type(value), np.ndarray) and value.dtype.hasobject:
        yield from value.ravel().tolist()
    if issubclass(type(value), logging.Logger):
        return
    yield from list((attributes_of(value) or {}).values())
    yield from (getattr(value, name, None) for name in slots(type(value)))


def of_result(value: Any, depth: int = 0) -> Hashable:
    """The mark of what a function gives anew each time that it is called: containers by what is in them."""
    if depth < 3 and issubclass(type(value), list | tuple | set | frozenset) and len(value) <= _FEW:
        return (type(value).__name__, tuple(of_result(one, depth + 1) for one in value))
    if depth < 3 and issubclass(type(value), dict) and len(value) <= _FEW:
        return ("dict", tuple((mark(name), of_result(one, depth + 1)) for name, one in value.items()))
    return _of_array(value) if issubclass(type(value), np.ndarray) else mark(value)


def holds_the_same(holder: Any, copy: Any) -> bool:
    """Whether a container holds what its copy does: the same objects in the same order, or numbers and texts that are alike.

    An array has the bytes of its copy, so that a NaN equals itself.
    """
    if issubclass(type(holder), np.ndarray):
        if holder.flags.c_contiguous and holder.dtype != object:
            return np.array_equal(holder.reshape(-1).view(np.uint8), copy.reshape(-1).view(np.uint8))
        return holder.tobytes() == copy.tobytes()
    if len(holder) != len(copy):
        return False
    if issubclass(type(holder), Mapping):
        if all(map(operator.is_, holder, copy)) and all(map(operator.is_, holder.values(), copy.values())):
            return True
        return _pairs(holder.items()) == _pairs(copy.items())
    if issubclass(type(holder), set | frozenset):
        return frozenset(map(mark, holder)) == frozenset(map(mark, copy))
    return all(map(operator.is_, holder, copy)) or all(
        mark(now) == mark(before) for now, before in zip(holder, copy, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def slots(kind: type) -> tuple[str, ...]:
    """Attributes that objects of this class have outside of a ``__dict__``."""
    found: list[str] = []
    for one in kind.__mro__:
        names = one.__dict__.get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return tuple(name for name in found if not name.startswith("__"))
