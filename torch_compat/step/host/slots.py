"""Slots: placeholders in the results, effects and host calls of a captured step for values that differ from step to step.

There are four: a :class:`ValueSlot` for a value that an executed step has somewhere, or a part of it, a
:class:`ComputedSlot` for what the host computes from such values, an :class:`ObjectSlot` for an object that was there before, and
a :class:`TensorSlot` for a tensor of the module or the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.capture.stand_ins import stood_for
from xlatrain.bridge.errors import CaptureError

Source = Literal["values", "scalars", "batch", "results", "counters", "objects", "tensors"]
"""A source of values of an executed step.

``values`` and ``scalars`` are outputs of its program, the latter packed, as float32; ``batch`` are the leaves of its batch that
are no tensors; ``results`` are those of its host calls; ``counters`` are its host values; ``objects`` are
those of the user's, and ``tensors`` those of the module and the batch.
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
    ``detached``: another tensor with the memory of this value.
    """

    source: Source
    index: int
    path: tuple[tuple[str, Any], ...] = ()
    grad: int | None = None
    columns: int | None = None
    detached: bool = False

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


@dataclass(frozen=True)
class TensorSlot:
    """A slot for a tensor that the user has, which is no value of the step: a parameter or buffer, or a tensor of the batch.

    Attributes:
        key: its name in the module, or its index in the batch.
        detached: whether it is one that shares its memory: ``.detach()``, ``.data``.
    """

    key: str | int
    detached: bool = False
    source: Source = "tensors"


SLOTS = (ValueSlot, ComputedSlot, ObjectSlot, TensorSlot)


_CONTAINERS = (list, dict, deque, set)


@dataclass
class Places:
    """Objects that a step makes and that are at several places of its result and of what it stores: each stays one object.

    Attributes:
        slots: by id of a tensor: it, and its slot; at first of those that are the user's own, in the module and the batch.
        memory: by its memory and geometry: the slot of the first such tensor.
        stored: the indices of the values that have slots, each time.
        shared: ids of the templates of lists, dicts and deques that are at several places, and of sets.
        texts: for each container at another place which of them it is, to tell runs apart.
    """

    slots: dict[int, tuple[Any, ValueSlot | TensorSlot]] = field(default_factory=dict)
    memory: dict[Any, ValueSlot | TensorSlot] = field(default_factory=dict)
    stored: list[int] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    _templates: dict[int, tuple[int, Any, Any]] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor, slot: ValueSlot | TensorSlot) -> None:
        """Note a tensor and its slot, which is also that of the parameter or buffer that it stands for."""
        self.slots[id(tensor)] = (tensor, slot)
        if (original := stood_for(tensor)) is not None:
            self.slots[id(original)] = (original, slot)
        self.memory.setdefault(_memory(tensor), slot)

    def find(self, tensor: torch.Tensor) -> ValueSlot | TensorSlot | None:
        """The slot of a tensor, or of the one whose memory it shares, if there is one.

        Raises:
            CaptureError: it is a part of a parameter or buffer, which later steps change.
        """
        if (known := self.slots.get(id(tensor))) is not None:
            if isinstance(known[1], ValueSlot):
                self.stored.append(known[1].index)
            return known[1]
        shared = None if tensor.requires_grad else self.memory.get(_memory(tensor))
        if shared is not None:
            return replace(shared, detached=True) if isinstance(shared, TensorSlot) else replace(shared, detached=True, grad=None)
        storage = _memory(tensor)[0]
        of = next((s.key for (one, *_), s in self.memory.items() if one == storage and isinstance(s, TensorSlot)), None)
        if isinstance(of, str):
            raise CaptureError(
                f"the step stores or returns a part or another view of self.{of}, whose values change with it; a compiled step "
                "would keep those of this step. Keep the tensor itself, or a copy (.clone())"
            )
        return None

    def forget(self) -> None:
        """Let go of the objects of the run."""
        self.slots.clear()
        self.memory.clear()
        self._templates.clear()

    def tied(self, value: Any, template: Any) -> Any:
        """``template`` with the templates made before for containers in ``value`` that have one."""
        if isinstance(value, _CONTAINERS):
            known = self._templates.get(id(value))
            if known is not None and known[1] is value:
                self.shared.add(id(known[2]))
                self.texts.append(f"again: {known[0]}")
                return known[2]
            if type(template) is not type(value) or (template is value and type(value) is not set):
                # a slot, or of a class that is not looked into
                return template
            self._templates[id(value)] = (len(self._templates), value, template)
        elif type(value) is not tuple:
            return template
        if isinstance(value, set) or isinstance(template, set):  # both; no tree, so that each step would give the very same one
            self.shared.add(id(template))
            return template
        if isinstance(value, tuple):
            return tuple(map(self.tied, value, template))
        for key in value if isinstance(value, dict) else range(len(value)):
            template[key] = self.tied(value[key], template[key])
        return template


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The memory of a traced tensor, and its geometry there."""
    if getattr(tensor, "elem", None) is not None:  # functionalized: each has its own
        return (id(tensor),)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype


def mapped_once(function: Callable[[Any], Any], tree: Any, shared: Collection[int], made: dict[int, Any], stop: Any) -> Any:
    """``pytree.tree_map`` for trees in which containers are at several places: each is mapped once.

    Args:
        shared: their ids.
        made: what was made of them, which is added to.
        stop: ``is_leaf``.
    """

    def of_leaf(leaf: Any) -> Any:
        number = id(leaf)
        if number not in shared:
            return function(leaf)
        if number not in made:
            within = lambda one: one is not leaf and ends(one)  # noqa: E731
            made[number] = leaf.copy() if isinstance(leaf, set) else pytree.tree_map(of_leaf, leaf, is_leaf=within)
        return made[number]

    def ends(one: Any) -> bool:
        return id(one) in shared or stop(one)

    return pytree.tree_map(of_leaf, tree, is_leaf=ends)


def indices_of_values(tree: Any) -> list[int]:
    """The indices, among the values of a step, of those that ``tree`` has slots for, in its order."""
    return [leaf.index for leaf in pytree.tree_leaves(tree) if isinstance(leaf, ValueSlot) and leaf.source == "values"]
