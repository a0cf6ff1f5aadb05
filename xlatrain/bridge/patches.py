"""Attributes of other libraries, replaced for a time, as while a function is captured."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def patched(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Make ``owner.name`` be ``value`` for each ``(owner, name, value)``, in the block.

    What an owner inherits, or finds by its ``__getattr__``, it inherits or finds again afterwards: it keeps nothing of ours.

    Raises:
        AttributeError: an owner has no such name. Nobody would look at what it is set to, and what the patch is for would be
            switched off without a word.
    """
    saved = []
    patches = list(patches)
    _STANDING.update([id(value) for _, _, value in patches])
    try:
        for owner, name, value in patches:
            own = _own(owner, name)
            if own is _NOTHING and not hasattr(owner, name):
                raise AttributeError(_missing(owner, name))
            _put(owner, name, value)
            saved.append((owner, name, own))
        yield
    finally:
        for owner, name, value in reversed(saved):
            _put(owner, name, value)
        for _, _, value in patches:
            if _STANDING[id(value)] == 1:
                del _STANDING[id(value)]
            else:
                _STANDING[id(value)] -= 1


def is_for_a_time(value: Any) -> bool:
    """Whether an object is there only as long as a :func:`patched` block lasts."""
    return _STANDING[id(value)] > 0


def _own(owner: Any, name: str) -> Any:
    for kind in type(owner).__mro__:
        if name in vars(kind) and hasattr(vars(kind)[name], "__set__"):
            return getattr(owner, name)  # the ``__name__`` of a class is none of its attributes
    return vars(owner).get(name, _NOTHING)


def _put(owner: Any, name: str, value: Any) -> None:
    no_sequence = name == "__getitem__" and isinstance(owner, type) and not _slot(owner, _SQ_ITEM)
    if value is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
    if no_sequence:
        _make_no_sequence(owner, name)


def _make_no_sequence(owner: type, name: str) -> None:
    """Make a class and those that inherit ``name`` of it again what they were in C: mappings, and no sequences.

    Python makes a class a sequence with the first ``__getitem__`` that it is given, and leaves it one when that is taken away.
    ``torch.tensor([a, b])`` asks for the length of what is a sequence, which a tensor of no dimension does not have.
    """
    for kind in owner.__subclasses__():
        if name not in vars(kind):
            _make_no_sequence(kind, name)
    found = _slot(owner, _SQ_ITEM)
    methods = ctypes.c_void_p.from_address(id(owner) + object.__basicsize__ + _AS_SEQUENCE * _POINTER).value
    item = methods and ctypes.c_void_p.from_address(methods + _ITEM * _POINTER)
    if found and item and item.value == found:  # in another Python these may lie elsewhere
        item.value = None


_POINTER = ctypes.sizeof(ctypes.c_void_p)
_SQ_ITEM = 44
"""The number of the slot in Python's stable interface."""
_AS_SEQUENCE, _ITEM = 11, 3
"""Places of ``tp_as_sequence`` in a type, after the head of an object, and of ``sq_item`` there."""
_slot = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_int)(("PyType_GetSlot", ctypes.pythonapi))
_STANDING: collections.Counter[int] = collections.Counter()
"""The ids of what stands in some place now; the patches hold them."""
_NOTHING = object()
"""What is patched is as it was afterwards: own, inherited, or found by ``__getattr__``."""


def _missing(owner: Any, name: str) -> str:
    """The error for a patch of nothing."""
    module = owner.__name__ if inspect.ismodule(owner) else getattr(owner, "__module__", None) or type(owner).__module__
    named = module if inspect.ismodule(owner) else f"{module}.{getattr(owner, '__qualname__', type(owner).__qualname__)}"
    library = module.partition(".")[0]
    installed = f"{library} {getattr(sys.modules.get(library), '__version__', '')}".rstrip()
    return (
        f"{named} has no attribute {name!r}, which is to be replaced for a time. {installed} is installed, and xlatrain was "
        "tested with releases that have it: `xlatrain doctor` says which. Install one of those; docs/private_names.toml in its "
        "sources says what the name is for and what may take its place"
    )
