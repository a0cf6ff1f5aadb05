"""Descriptions of what a step stores, returns, or gives to a call on the host: equal texts where another run did the same.

An object that the step makes is another one in each run, so that it is described by what is in it. One that was there before, or
that cannot be looked into (a lock, a memory map, a tensor from outside of the step), is described by which one it is.
So is an array or object that the step stores or returns: hooks may change it, and the next step makes another.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.arrays import HostArray
from torch_compat.step.host.batch_texts import TracedDict, TracedText, TracedTexts
from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.later_text import LaterText
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.host.slots import SLOTS
from torch_compat.step.values import policy
from torch_compat.step.values.generators import state_of
from torch_compat.step.values.marks import has_contents, slots
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.user_objects import attributes_of, is_user_class

_SHORT = 200  # characters that are written out
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(Ellipsis), *SLOTS})
VALUES = (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, np.generic, range, slice, enum.Enum)
"""Classes whose objects do not change, and show all that they are."""
_SINGLE = (
    *(torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type, types.ModuleType, types.BuiltinFunctionType),
    *(logging.Logger, logging.Handler),  # a step makes none
)
_OF_THE_STEP = (HostArray, HostScalar, HostFuture, LaterText, TracedText, TracedTexts, TracedDict)
_HEAP_TYPE = 1 << 9
_OURS = ("torch_compat", "xlatrain")


def describe(tree: Any, there_before: Collection[int] = frozenset(), *, kept: bool = False) -> str:
    """A recorded value or result as text that is equal for equal captures.

    Args:
        there_before: ids of objects that were there before the step.
        kept: whether the user has it after the step, and may change it.
    """
    leaves, spec = pytree.tree_flatten(tree)

    def text(leaf: Any) -> str:
        return _identity(leaf) if kept and _may_be_changed(leaf) else of(leaf)

    of = _Description(there_before).of
    return text(tree) if spec.is_leaf() else f"[{', '.join(map(text, leaves))}] {spec}"


class _Description:
    """The text of one value, in which an object that comes again is named by its number."""

    def __init__(self, there_before: Collection[int]) -> None:
        self._there_before = there_before
        self._met: dict[int, Any] = {}  # holds them: an id must not be used twice

    def of(self, value: Any, depth: int = 0) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, VALUES):
            return f"{kind.__qualname__}: {value!r}"
        if kind in _OF_THE_STEP or is_traced(value) or kind.__module__.partition(".")[0] in _OURS:
            return f"a {kind.__qualname__}"
        if isinstance(value, _SINGLE) or id(value) in self._there_before:
            return _identity(value)
        if id(value) in self._met:
            return f"value {list(self._met).index(id(value))} again"
        if depth == policy.DEPTH or len(self._met) == policy.OBJECTS:
            return f"a {kind.__qualname__}"
        self._met[id(value)] = value
        inside = ", ".join(self._parts(value, depth + 1))
        if len(inside) > _SHORT:
            inside = hashlib.blake2b(inside.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return f"{kind.__qualname__}({inside})"

    def _parts(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, types.FunctionType):
            yield from self._of_function(value, depth)
        elif isinstance(value, types.MethodType):
            yield from self._all((value.__func__, value.__self__), depth)
        elif isinstance(value, functools.partial):
            yield from self._all((value.func, *value.args), depth)
            yield from self._pairs(value.keywords.items(), depth)
        elif isinstance(value, np.ndarray):
            yield from self._of_array(value, depth)
        elif isinstance(value, memoryview):
            yield repr(value.tobytes())
        elif isinstance(value, dict | types.MappingProxyType):
            yield from self._pairs(value.items(), depth)
            yield from self._attributes(value, depth)
        elif isinstance(value, set | frozenset):
            yield from sorted(self._all(value, depth))
            yield from self._attributes(value, depth)
        elif isinstance(value, list | tuple):
            yield from self._all(value, depth)
            yield from self._attributes(value, depth)
        elif is_plain_object(type(value)) and (attributes_of(value) is not None or slots(type(value))):
            yield from self._attributes(value, depth)
        else:
            yield from self._of_copy(value, depth)

    def _of_copy(self, value: Any, depth: int) -> Iterator[str]:
        """The parts of which a copy of an object would be made: C code may hold something beside attributes."""
        try:
            made = value.__reduce_ex__(4)
        except Exception:  # there is no copy of it
            made = None
        if isinstance(made, tuple):
            yield from self._all((tuple(part) if isinstance(part, Iterator) else part for part in made), depth)
        else:
            yield made if isinstance(made, str) else _identity(value)

    def _of_array(self, value: np.ndarray, depth: int) -> Iterator[str]:
        yield f"{value.dtype}{value.shape}"
        if value.dtype == object:
            yield from self._all(value.reshape(-1).tolist(), depth)
        else:
            yield _identity(value) if value.nbytes > policy.BYTES else repr(value.tobytes())

    def _of_function(self, value: types.FunctionType, depth: int) -> Iterator[str]:
        code = value.__code__
        yield f"{code.co_filename}:{code.co_firstlineno} {hash(code)}"
        yield from self._all(value.__defaults__ or (), depth)
        yield from self._pairs((value.__kwdefaults__ or {}).items(), depth)
        yield from self._all((cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()), depth)

    def _attributes(self, value: Any, depth: int) -> Iterator[str]:
        yield from self._pairs((attributes_of(value) or {}).items(), depth)
        for name in slots(type(value)):
            held = getattr(value, name, MISSING)
            if held is not MISSING:
                yield f"{name}={self.of(held, depth)}"

    def _pairs(self, items: Iterable[tuple[Any, Any]], depth: int) -> Iterator[str]:
        return (f"{self.of(name, depth)}: {self.of(held, depth)}" for name, held in items)

    def _all(self, values: Iterable[Any], depth: int) -> Iterator[str]:
        return (self.of(one, depth) for one in values)


def _may_be_changed(value: Any) -> bool:
    """Whether it is an object, a generator or an array, or a list or the like that is not looked into for slots."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, VALUES) or kind in _OF_THE_STEP or is_traced(value) or kind in (set, frozenset):
        return False
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return False
    if kind.__module__.partition(".")[0] in _OURS:
        return False
    if has_contents(kind) or attributes_of(value) is not None or (is_user_class(kind) and slots(kind)):
        return True
    return state_of(value) is not None


@functools.lru_cache(maxsize=4096)
def is_plain_object(kind: type) -> bool:
    """Whether objects of a class hold nothing but attributes: all of its classes are written in Python."""
    return all(one.__flags__ & _HEAP_TYPE for one in kind.__mro__[:-1]) and kind.__reduce_ex__ is object.__reduce_ex__


def _identity(value: Any) -> str:
    return f"the {type(value).__qualname__} {id(value):#x}"
