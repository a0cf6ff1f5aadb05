"""What a captured step assumed about the host: attributes of modules that it read, ``training`` and ``requires_grad`` flags.

A capture notes which attributes it reads. Afterwards an assignment to an attribute of a module is noted too; values of attributes
that were both read and assigned are part of what selects a variant. Nothing is compared while nothing is assigned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch

_PRIMITIVES = (bool, int, float, complex, str, bytes, type(None))
_NOT_STATE = frozenset({"_current_fx_name", "_trainer", "_fabric"})


class HostGuards:
    """Follows the attributes of a module tree during a run. Only one may be active at a time.

    Args:
        module: the root of the tree.
    """

    _active: HostGuards | None = None

    def __init__(self, module: torch.nn.Module) -> None:
        self._index = {id(child): name for name, child in module.named_modules()}
        self._assigned: dict[tuple[str, str], torch.nn.Module] = {}
        self._reads: dict[str, set[tuple[str, str]]] = {}
        self._keys: dict[str, tuple[int, Hashable]] = {}
        self._changes = 0

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """While active, assignments to attributes of the tree are noted."""
        original = torch.nn.Module.__setattr__

        def setattr_and_note(module: torch.nn.Module, name: str, value: Any) -> None:
            original(module, name, value)
            path = self._index.get(id(module))
            if path is not None and name not in _NOT_STATE and name in module.__dict__:
                self._assigned[path, name] = module
                self._changes += 1

        torch.nn.Module.__setattr__ = setattr_and_note
        try:
            yield
        finally:
            torch.nn.Module.__setattr__ = original

    @contextlib.contextmanager
    def capturing(self, step: str) -> Iterator[None]:
        """While active, attributes that are read count as read by ``step``."""
        reads = self._reads.setdefault(step, set())
        index = self._index
        original = torch.nn.Module.__getattribute__

        def read_and_note(module: torch.nn.Module, name: str) -> Any:
            path = index.get(id(module))
            if path is not None:
                reads.add((path, name))
            return original(module, name)

        torch.nn.Module.__getattribute__ = read_and_note
        try:
            yield
        finally:
            del torch.nn.Module.__getattribute__
            self._changes += 1

    def key(self, step: str) -> Hashable:
        """The values of the attributes that ``step`` reads and that were assigned during the run."""
        cached = self._keys.get(step)
        if cached is not None and cached[0] == self._changes:
            return cached[1]
        relevant = sorted(self._reads.get(step, set()) & self._assigned.keys())
        values = tuple((where, fingerprint(self._assigned[where].__dict__.get(where[1]))) for where in relevant)
        self._keys[step] = (self._changes, values)
        return values

    def describe(self, before: Hashable, now: Hashable) -> list[str]:
        """Which attributes differ between two keys."""
        old, new = dict(before), dict(now)  # pyright: ignore[reportArgumentType, reportCallIssue]
        changed = [where for where in {*old, *new} if old.get(where) != new.get(where)]
        return [f"self.{path + '.' if path else ''}{name}" for path, name in sorted(changed)]


def fingerprint(value: Any, depth: int = 0) -> Hashable:
    """Equal for values that a captured step cannot tell apart: primitives by value, tensors and objects by identity.

    The tensors in a list or dict do not count: a step that only appends to a list does not depend on them.
    """
    if isinstance(value, _PRIMITIVES):
        return (type(value).__name__, value)
    if isinstance(value, list | tuple) and depth < 4:
        return (type(value).__name__, tuple(fingerprint(v, depth + 1) for v in value if not isinstance(v, torch.Tensor)))
    if isinstance(value, dict) and depth < 4:
        return ("dict", tuple((repr(k), fingerprint(v, depth + 1)) for k, v in value.items() if not isinstance(v, torch.Tensor)))
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value), value._version)
    return ("object", id(value))
