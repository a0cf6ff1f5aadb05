"""Objects that keep what they hold in memory of C: a capture can neither see nor take back what a step changes of them."""

from __future__ import annotations

import builtins
import contextvars
import ctypes
import enum
import functools
import io
import random
import re
import sys
import types
from typing import Any

import numpy as np

from torch_compat.step.values import policy
from torch_compat.step.values.marks import PLAIN, has_contents, inside

_POINTER = 8  # bytes
_KNOWN = (
    *(*PLAIN, range, slice, enum.Enum, random.Random, types.SimpleNamespace, io.StringIO, io.BytesIO),
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.CellType),
)
"""Classes that are looked after by name, or hold nothing that changes, with those below them."""
_SCANNER = type(re.compile("").scanner(""))  # pyright: ignore[reportAttributeAccessIssue]
_UNKNOWN: tuple[Any, ...] = (ctypes.POINTER(ctypes.c_char).__base__, contextvars.Context, np.random.SeedSequence, _SCANNER)
"""Classes of the packages below that are not."""
_NO_STATE = frozenset(
    {"re", "_sre", "datetime", "_datetime", "decimal", "_decimal", "fractions", "_struct", "struct", "functools", "_functools"}
    | {"operator", "_operator", "itertools", "_thread", "threading", "contextvars", "_contextvars", "weakref", "_weakref"}
    | {"_weakrefset", "collections", "_collections", "_collections_abc", "types", "typing", "_typing", "pathlib", "array"}
    | {"ctypes", "_ctypes", "uuid", "zoneinfo", "random", "_random", "enum", "abc", "_abc", "string", "time", "json", "_json"}
    | {"posix", "pybind11_builtins", "nanobind"}  # what their functions are bound to: a record of the function itself
)
"""Packages whose objects hold nothing that changes, or what is known."""
_ANONYMOUS = frozenset({"PyCapsule", "instancemethod", "managedbuffer", "builtin_method", "fortran"})
"""Classes of Python's own that no module has by name, and of functions."""
_OWN = frozenset(map(id, (*vars(builtins).values(), *vars(types).values())))
_IN_AN_ATTRIBUTE = 4
"""References to what one object alone holds, as they are counted here."""


@functools.cache
def keeps_in_c(kind: type) -> bool:
    """Whether objects of a class, or of one that it is made from, have memory of C of which is not known what is in it.

    Iterators have it, too; they are looked after as what gives something else each time.
    """
    if issubclass(kind, _UNKNOWN):
        return True
    if issubclass(kind, _KNOWN) or has_contents(kind):
        return False
    if issubclass(kind, io.IOBase):
        return True
    if hasattr(kind, "__next__") or hasattr(kind, "__get__"):  # functions of Cython and the like
        return False
    first: Any = kind
    while first is not object and not _has_memory(first):
        first = first.__base__
    if first is object or id(first) in _OWN or (first.__module__ == "builtins" and first.__name__ in _ANONYMOUS):
        return False
    root = first.__module__.partition(".")[0]
    return root not in _NO_STATE and root not in policy.LIBRARIES


def _has_memory(kind: type) -> bool:
    """Whether objects of a class have memory besides that of its base, their attributes and slots."""
    base: Any = kind.__base__
    size = kind.__basicsize__ - base.__basicsize__
    size -= _POINTER * sum(getattr(kind, name) > 0 >= getattr(base, name) for name in ("__dictoffset__", "__weakrefoffset__"))
    named = kind.__dict__.get("__slots__", ())
    named = [named] if isinstance(named, str) else [one for one in named if one not in ("__dict__", "__weakref__")]
    return size != _POINTER * len(named) or kind.__itemsize__ != base.__itemsize__


def kept_alone(value: Any) -> list[Any]:
    """The objects that keep what they hold in C of an object of Python's own library, which nobody else holds."""
    if value is None or isinstance(value, PLAIN) or type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
        return []
    return [one for one in inside(value) if keeps_in_c(type(one)) and sys.getrefcount(one) <= _IN_AN_ATTRIBUTE]
