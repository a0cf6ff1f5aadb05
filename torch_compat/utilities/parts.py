"""Members of an object that are members of one of its parts: a row each, in place of a function that only passes on."""

from __future__ import annotations

import operator
from typing import Any


def of(path: str, doc: str | None = None, *, settable: bool = False) -> Any:
    """A property that is a member of a part; of a method the caller gets the part's own.

    ::

        class Wheel:
            size: int = of("tyre.size", "In inches.")

    Args:
        path: names with dots between them, from the object on.
        doc: what it is.
        settable: whether it can be assigned, too.
    """
    part, _, name = path.rpartition(".")
    find = operator.attrgetter(part)

    def assign(owner: Any, value: Any) -> None:
        setattr(find(owner), name, value)

    return property(operator.attrgetter(path), assign if settable else None, doc=doc)
