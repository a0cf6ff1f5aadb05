"""Slots: placeholders in the results, effects and host calls of a captured step for values that differ from step to step.

There are three: a :class:`ValueSlot` for a value that an executed step has somewhere, or a part of it, a
:class:`ComputedSlot` for what the host computes from such values, and an :class:`ObjectSlot` for an object that was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.utils._pytree as pytree

Source = Literal["values", "scalars", "batch", "results", "counters", "objects"]
"""A source of values of an executed step.

``values`` and ``scalars`` are outputs of its program, the latter packed, as float32; ``batch`` are the leaves of its batch that
are no tensors; ``results`` are those of its host calls; ``counters`` are its host values; ``objects`` are
those of the user's.
"""


@dataclass(frozen=True)
class ResultTemplate:
    """The user's return value with slots where its tensors, counters and parts of the batch were."""

    tree: Any


@dataclass(frozen=True, repr=False)
class ValueSlot:
    """A slot for the ``index``-th value of a source, or for the part of it that ``path`` leads to.

    A step of the path is ``("item", key)`` or ``("attr", name)``. ``grad`` is the index among the values of its gradient, where
    the step has called ``retain_grad()`` of it; ``columns`` that of the number of its columns, where only the step knows it.
    """

    source: Source
    index: int
    path: tuple[tuple[str, Any], ...] = ()
    grad: int | None = None
    columns: int | None = None

    def part(self, kind: str, key: Any) -> ValueSlot:
        """The slot for a part of this one's value."""
        return ValueSlot(self.source, self.index, (*self.path, (kind, key)))

    def find(self, values: Sequence[Any]) -> Any:
        """The value of a step, among those of its source."""
        found = values[self.index]
        for kind, key in self.path:
            found = getattr(found, key) if kind == "attr" else found[key]
        return found

    def __repr__(self) -> str:
        path = "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in self.path)
        return f"ValueSlot({self.source}[{self.index}]{path})"


@dataclass(frozen=True)
class ComputedSlot:
    """A slot for what ``find`` computes from a source's values; ``text`` tells it from others."""

    source: Source
    find: Callable[[Any], Any] = field(compare=False, repr=False)
    text: str


@dataclass(frozen=True)
class ObjectSlot:
    """A slot for a list, dict, deque or set that was there before: the very object, which a copy of the tree would not have.

    Attributes:
        text: its place, as a user writes it.
        held: the object.
    """

    text: str
    held: Any = field(compare=False, repr=False)
    source: Source = "objects"


SLOTS = (ValueSlot, ComputedSlot, ObjectSlot)


def indices_of_values(tree: Any) -> list[int]:
    """The indices, among the values of a step, of those that ``tree`` has slots for, in its order."""
    return [leaf.index for leaf in pytree.tree_leaves(tree) if isinstance(leaf, ValueSlot) and leaf.source == "values"]
