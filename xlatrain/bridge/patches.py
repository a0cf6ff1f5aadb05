"""Attributes of other libraries that are something else for a time, as while a function is captured."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def patched(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Make ``owner.name`` be ``value`` for each ``(owner, name, value)``, in the block.

    What an owner inherits, or finds by its ``__getattr__``, it inherits or finds again afterwards: it keeps nothing of ours.
    """
    saved = []
    try:
        for owner, name, value in patches:
            own = _own(owner, name)
            setattr(owner, name, value)
            saved.append((owner, name, own))
        yield
    finally:
        for owner, name, value in reversed(saved):
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _own(owner: Any, name: str) -> Any:
    if hasattr(inspect.getattr_static(type(owner), name, None), "__set__"):
        return getattr(owner, name)  # the ``__name__`` of a class is none of its attributes
    return vars(owner).get(name, _NOTHING)


_NOTHING = object()
