"""Names, with the namespaces in which Python looks them up, so that their values can be compared and put back."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

MISSING: Any = object()
"""In place of a value that is not there."""


@dataclass(frozen=True, eq=False)
class Name:
    """A name, with the namespace in which it is looked up.

    Attributes:
        text: the name as a user knows it.
        holder: a mapping with ``get``: a module's globals, a class's attributes, a closure's cell.
        name: the key in ``holder``.
        owner: the object whose attribute it is, if it is no entry of ``holder`` itself.
        optional: whether the name counts also while it has no value, e.g. on a subclass.
    """

    text: str
    holder: Any
    name: str
    owner: Any = None
    optional: bool = False

    def assign(self, value: Any) -> None:
        """Give it a value; :data:`MISSING` deletes it."""
        if self.owner is None:
            self.holder[self.name] = value
        elif value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Cell:
    """A variable of an enclosing function."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value


@dataclass(frozen=True)
class Attributes:
    """Attributes of an object, properties too."""

    owner: Any

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.owner, name, default)


@dataclass(frozen=True)
class Defaults:
    """Defaults of a function's arguments, by number."""

    function: types.FunctionType

    def get(self, name: str, default: Any = None) -> Any:
        values = self.function.__defaults__ or ()
        return values[int(name)] if int(name) < len(values) else default


@dataclass(frozen=True)
class State:
    """The attributes of a Trainer's ``state``, which may be another object each time."""

    trainer: Any

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.trainer.state, name, default)
