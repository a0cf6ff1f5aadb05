"""Objects that a step makes and keeps, with tensors of the step in their attributes: each step makes them anew.

``self.posterior = Normal(mean, scale)`` leaves an object whose tensors have values only in a step that runs. What is recorded of
it is its class and the values in its attributes; filled with real tensors these are another object of that class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_compat.step.effects.descriptions import is_plain_object
from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.slots import SLOTS
from torch_compat.step.values import policy
from torch_compat.step.values.marks import slots
from torch_compat.step.values.user_objects import attributes_of
from torch_compat.utilities.metric_types import is_metric_or_collection
from xlatrain.bridge.tensors.live import is_live

_CONTAINERS = (list, tuple, dict, deque, set, frozenset)
_OURS = ("torch_compat", "xlatrain")
_DEPTH = 12
_MOST = 10_000  # values that are looked at


@dataclass
class MadeObject:
    """The record of an object: a node of torch's pytrees, which becomes the object once no value of a step is in it.

    Attributes:
        kind: its class.
        held: its attributes.
    """

    kind: type
    held: dict[str, Any]

    def object(self) -> Any:
        """Another object of the class, with these attributes. No code of the class runs."""
        made = SimpleNamespace() if self.kind is SimpleNamespace else object.__new__(self.kind)
        own = attributes_of(made)
        for name, value in self.held.items():
            if own is not None and name not in slots(self.kind):
                own[name] = value
            else:
                object.__setattr__(made, name, value)
        return made


def _flatten(made: MadeObject) -> tuple[list[Any], Any]:
    return list(made.held.values()), (made.kind, tuple(made.held))


def _unflatten(values: Any, context: Any) -> Any:
    kind, names = context
    made = MadeObject(kind, dict(zip(names, values, strict=True)))
    waits = any(isinstance(one, SLOTS) or type(one) is MadeObject or _is_of_step(one) for one in pytree.tree_leaves(made.held))
    return made if waits else made.object()


pytree.register_pytree_node(MadeObject, _flatten, _unflatten, serialized_type_name="torch_compat.MadeObject")


@dataclass
class MadeObjects:
    """The objects of one run of a step that are kept, each at one place.

    Args:
        there_before: ids of what the step has not made.
    """

    there_before: Collection[int]
    _met: dict[int, Any] = field(default_factory=dict)  # objects, and containers in them: held, an id must not be used twice

    def recorded(self, tree: Any) -> Any:
        """``tree`` with :class:`MadeObject` for those in it that can be made anew; others stay as they are."""

        def of_leaf(leaf: Any) -> Any:
            return self._of(leaf) if self._is_made(leaf) and _holds_of_step(leaf) else leaf

        return pytree.tree_map(of_leaf, tree) if any(map(self._is_made, pytree.tree_leaves(tree))) else tree

    def _of(self, value: Any) -> Any:
        """The record of an object; it itself where it, or something in it, is at another place, too."""
        met, found = dict(self._met), self._part(value, 0)
        if found is None:
            self._met = {**met, id(value): value}
            return value
        return found

    def _part(self, value: Any, depth: int) -> Any:
        """A value in an object, with nothing in it that the step has made; None where that cannot be."""
        if value is None or isinstance(value, torch.Tensor) or not (isinstance(value, _CONTAINERS) or self._is_made(value)):
            return value
        if id(value) in self.there_before or (isinstance(value, tuple | frozenset) and not value):
            return value
        if not isinstance(value, _CONTAINERS) and not _holds_of_step(value):
            return value
        if id(value) in self._met or depth > _DEPTH:
            return None
        self._met[id(value)] = value
        if isinstance(value, _CONTAINERS):
            parts, structure = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
            if structure.is_leaf():  # of a class that is not looked into
                return None if _holds_of_step(value) else value
            several = [self._part(one, depth + 1) for one in parts]
            lost = any(new is None and old is not None for new, old in zip(several, parts, strict=True))
            return None if lost else pytree.tree_unflatten(several, structure)
        held = {name: self._part(one, depth + 1) for name, one in _attributes(value).items()}
        lost = any(held[name] is None and one is not None for name, one in _attributes(value).items())
        return None if lost else MadeObject(type(value), held)

    def _is_made(self, value: Any) -> bool:
        return id(value) not in self.there_before and may_be_made(value)


def may_be_made(value: Any) -> bool:
    """Whether an object is nothing but its attributes, so that another one with these is as good."""
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    if kind.__module__ == "builtins" or kind.__module__.partition(".")[0] in _OURS or not is_plain_object(kind):
        return False
    if isinstance(value, torch.nn.Module | torch.Tensor | torch.optim.Optimizer | type) or is_metric_or_collection(value):
        return False
    return attributes_of(value) is not None or bool(slots(kind))


def keeps_of_step(value: Any) -> bool:
    """Whether an object keeps a tensor of the running step in its attributes."""
    return may_be_made(value) and _holds_of_step(value)


def _attributes(value: Any) -> dict[str, Any]:
    apart = {name: getattr(value, name) for name in slots(type(value)) if hasattr(value, name)}
    return {**(attributes_of(value) or {}), **apart}


def _holds_of_step(value: Any) -> bool:
    met: dict[int, Any] = {}

    def inside(one: Any, depth: int) -> bool:
        if isinstance(one, torch.Tensor):
            return _is_of_step(one)
        if id(one) in met or depth > _DEPTH or len(met) > _MOST or not (isinstance(one, _CONTAINERS) or may_be_made(one)):
            return False
        met[id(one)] = one
        return any(inside(part, depth + 1) for part in _parts(one))

    return inside(value, 0)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from dict.values(value)
    elif isinstance(value, _CONTAINERS):
        yield from tuple(value)[: policy.MOST]
    if not isinstance(value, _CONTAINERS):
        yield from _attributes(value).values()


def _is_of_step(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_traced(value) and not is_live(value)
