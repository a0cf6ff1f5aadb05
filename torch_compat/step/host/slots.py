"""Slots: placeholders in the results, effects and host calls of a captured step for values that differ from step to step.

There are five: a :class:`ValueSlot` for a value that an executed step has somewhere, or a part of it, a
:class:`ComputedSlot` for what the host computes from such values, an :class:`ObjectSlot` for an object that was there before, a
:class:`BatchSlot` for one of the batch, and a :class:`TensorSlot` for a tensor of the module or the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.capture.generation.uncut import Uncut
from xlatrain.bridge.capture.recorded.tape import first_of
from xlatrain.bridge.capture.stand_ins import stood_for
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.tensors.strides import Geometry, geometry_of, is_whole, overlap

Source = Literal["values", "scalars", "batch", "results", "counters", "objects", "containers", "tensors"]
"""A source of values of an executed step.

``values`` and ``scalars`` are outputs of its program, the latter packed, as float32; ``batch`` are the leaves of its batch that
are no tensors; ``results`` are those of its host calls; ``counters`` are its host values; ``objects`` are
those of the user's, ``containers`` those of the batch, and ``tensors`` those of the module and the batch.
"""


@dataclass(frozen=True)
class ResultTemplate:
    """The user's return value with slots where its tensors, counters and parts of the batch were."""

    tree: Any


@dataclass(frozen=True)
class View:
    """Another tensor with the memory of one.

    Attributes:
        geometry: in that memory, relative to the one.
        number: tells those of a step apart.
    """

    geometry: Geometry
    number: int


@dataclass(frozen=True, repr=False)
class ValueSlot:
    """A slot for the ``index``-th value of a source, or for the part of it that ``path`` leads to.

    A step of the path is ``("item", key)`` or ``("attr", name)``. ``grad`` is the index among the values of its gradient, where
    a backward pass of the step has left one in it; ``columns`` that of the number of its columns, where only the step knows it.
    ``view``: another tensor with the memory of this value, as which ``alone`` is a value, too.
    """

    source: Source
    index: int
    path: tuple[tuple[str, Any], ...] = ()
    grad: int | None = None
    columns: int | None = None
    view: View | None = None
    alone: int | None = None

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
        return f"ValueSlot({self.source}[{self.index}]{path}{'' if self.view is None else f' as {self.view}'})"


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
class BatchSlot:
    """A slot for a list, dict or object of the batch, to which ``names`` lead: the user's own."""

    names: tuple[Any, ...]
    source: Source = "containers"


@dataclass(frozen=True)
class TensorSlot:
    """A slot for a tensor that the user has, which is no value of the step: a parameter or buffer, or a tensor of the batch.

    Attributes:
        key: its name in the module, or its index in the batch.
        view: another one with its memory: ``.detach()``, ``.data``, a part of it.
    """

    key: str | int
    view: View | None = None
    source: Source = "tensors"


SLOTS = (ValueSlot, ComputedSlot, ObjectSlot, BatchSlot, TensorSlot)


_CONTAINERS = (list, dict, deque, set)
_SEVERAL = (
    "the step stores or returns several views of a tensor, and hooks may change it in each; a compiled step would make as many "
    "tensors. Keep the tensor itself, or copies (.clone())"
)


@dataclass
class Places:
    """Objects that a step makes and that are at several places of its result and of what it stores: each stays one object.

    So does the memory of its tensors: what is written to one is seen in its views.

    Attributes:
        slots: by id of a tensor: it, and its slot; at first of those that are the user's own, in the module and the batch.
        roots: by its memory: the tensor as a view of which others are told, and its slot.
        stored: the indices of the values that have slots, each time.
        shared: ids of the templates of lists, dicts and deques that are at several places, and of sets.
        texts: for each container at another place which of them it is, to tell runs apart.
        views: whether parts of a tensor, and tensors that can be differentiated, are views, too.
    """

    slots: dict[int, tuple[Any, ValueSlot | TensorSlot]] = field(default_factory=dict)
    roots: dict[int, tuple[torch.Tensor, ValueSlot | TensorSlot]] = field(default_factory=dict)
    stored: list[int] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    views: bool = True
    _wanted: dict[int, torch.Tensor] = field(default_factory=dict)
    _templates: dict[int, tuple[int, Any, Any]] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor, slot: ValueSlot | TensorSlot) -> None:
        """Note a tensor and its slot, which is also that of the parameter or buffer that it stands for."""
        self.slots[id(tensor)] = (tensor, slot)
        if (original := stood_for(tensor)) is not None:
            self.slots[id(original)] = (original, slot)
        if slot.view is None:
            self.roots.setdefault(_memory(tensor), (tensor, slot))

    def look(self, tensors: Iterable[torch.Tensor]) -> None:
        """Find the tensors of which several that are kept, these, are views.

        Raises:
            CaptureError: there is none.
        """
        several: dict[int, dict[int, torch.Tensor]] = {}
        for one in tensors:
            several.setdefault(_memory(one), {})[id(one)] = one
        for memory, views in several.items():
            if memory in self.roots or len(views) == 1 or len({geometry_of(one) for one in views.values()}) == 1:
                continue
            bases = (one._base for one in views.values())
            whole = next((one for one in (*views.values(), *bases) if one is not None and is_whole(one)), None)
            if whole is None and (whole := first_of(next(iter(views.values())))) is None:
                raise CaptureError(_SEVERAL)
            self._wanted[memory] = whole

    def root_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to keep a value of, so that ``tensor`` is a view of it: itself, where nothing else that is kept is."""
        return self._wanted.get(_memory(tensor), tensor)

    def find(self, tensor: torch.Tensor) -> ValueSlot | TensorSlot | None:
        """The slot of a tensor, or of the one whose memory it shares, if there is one.

        Raises:
            CaptureError: it shares that otherwise than a tensor of the same kind, without gradients of a parameter, does.
        """
        if (known := self.slots.get(id(tensor))) is not None:
            if isinstance(known[1], ValueSlot):
                self.stored.append(known[1].index)
            return known[1]
        root, slot = self.roots.get(_memory(tensor), (None, None))
        if root is None or slot is None:
            return None
        geometry = geometry_of(tensor, root)
        is_part = geometry != geometry_of(root, root)
        if (is_part or tensor.requires_grad) and not self.views:
            return None
        of = f"self.{slot.key}" if isinstance(slot, TensorSlot) else "a tensor that it keeps, too"
        of_user = isinstance(slot, TensorSlot) and isinstance(slot.key, int)
        if is_part and not of_user and not is_whole(root):
            if not overlap(tensor, root):
                return None
            raise CaptureError(_SEVERAL)
        alike = (tensor.dtype, tensor.is_conj(), tensor.is_neg()) == (root.dtype, root.is_conj(), root.is_neg())
        if not alike or (isinstance(slot, TensorSlot) and tensor.requires_grad):
            raise CaptureError(
                f"the step stores or returns a view of {of}, as other numbers or with its gradients: its values change with it, "
                "and a compiled step would keep those of this step. Keep the tensor itself, or a copy (.clone())"
            )
        view = View(geometry, len(self.slots))
        if isinstance(slot, TensorSlot):
            return replace(slot, view=view)
        return replace(slot, view=view, grad=None, alone=None if is_part else slot.index)

    def forget(self) -> None:
        """Let go of the objects of the run."""
        self.slots.clear()
        self.roots.clear()
        self._wanted.clear()
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


def _memory(tensor: torch.Tensor) -> int:
    """The memory of a traced tensor."""
    if isinstance(tensor, Uncut):  # which would ask how long the sequences are
        return id(tensor)
    inner = getattr(tensor, "elem", None)  # functionalized: the wrapper has its own
    return (tensor if inner is None else inner).untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


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
