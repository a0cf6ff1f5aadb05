"""Fingerprints of containers and objects that a step reads and that change without an assignment to a module's attribute."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_compat.step.values import policy
from torch_compat.step.values.marks import PLAIN, holds_the_same, mark
from torch_compat.step.values.user_objects import attributes_of

_OPAQUE = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, type, types.FunctionType, types.MethodType, types.ModuleType)


@dataclass
class Fingerprint:
    """The fingerprint of containers: what they held.

    Attributes:
        entries: containers, each with a shallow copy.
        sizes: containers that are too large for a copy, each with its length.
    """

    entries: list[tuple[Any, Any]] = field(default_factory=list)
    sizes: list[tuple[Any, int]] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Fingerprint:
        found = cls()
        found._add(value, 0)
        return found

    def _add(self, value: Any, depth: int) -> None:
        holder = contents_of(value)
        if holder is None or depth == policy.DEPTH_OF_SETTINGS or any(holder is known for known, _ in self.entries):
            return
        if len(holder) > (policy.ENTRIES_OF_LISTS if isinstance(holder, list | deque) else policy.ENTRIES):
            self.sizes.append((holder, len(holder)))
            return
        self.entries.append((holder, holder.copy()))
        if len(holder) > policy.ENTRIES:
            return
        for item in holder.values() if isinstance(holder, dict) else holder:
            self._add(item, depth + 1)

    def changed(self) -> bool:
        try:
            if any(len(holder) != size for holder, size in self.sizes):
                return True
            return not all(holds_the_same(holder, before) for holder, before in self.entries)
        except RuntimeError:  # it changes while it is looked at
            return True


def contents_of(value: Any) -> Any:
    """The mutable container that holds the contents of ``value``: itself, or its ``__dict__``; None if there is none."""
    if isinstance(value, dict | list | set | deque):
        return value
    if isinstance(value, (*PLAIN, *_OPAQUE)) or _is_of_a_trainer(value):
        return None
    return attributes_of(value)


def _is_of_a_trainer(value: Any) -> bool:
    """Whether it has a Trainer; not asked of ``__getattr__``, which may answer with anything."""
    return (attributes_of(value) or {}).get("_trainer") is not None or hasattr(type(value), "_trainer")


def fingerprint(value: Any, depth: int = 0, *, tensors: bool = False) -> Hashable:
    """Equal for values that a captured step cannot tell apart: primitives by value, tensors and objects by identity.

    Args:
        tensors: whether the tensors in a list or dict count; a step that only appends to a list does not depend on them.
    """
    if isinstance(value, PLAIN):
        return mark(value)
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value), value._version)
    if depth >= policy.DEPTH_OF_SETTINGS:
        return ("object", id(value))

    def of(items: Any) -> Hashable:
        return tuple(fingerprint(v, depth + 1, tensors=tensors) for v in items if tensors or not isinstance(v, torch.Tensor))

    if isinstance(value, list | tuple | deque):
        return (type(value).__name__, of(value))
    if isinstance(value, set):
        return ("set", frozenset(map(mark, value)))
    holder = contents_of(value)
    if holder is None:
        return ("object", id(value))
    if len(holder) > policy.ENTRIES:
        return ("object", id(value), len(holder))
    kept = {k: v for k, v in holder.items() if tensors or not isinstance(v, torch.Tensor)}
    return ("dict" if holder is value else id(value), tuple(map(repr, kept)), of(kept.values()))
