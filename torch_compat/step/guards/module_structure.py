"""The structure of a module tree: which modules are in it, and which hooks are registered on them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from torch_compat.step.effects.snapshots import HOOKS
from torch_compat.step.guards.identity_check import IdentityCheck
from torch_compat.step.guards.parameter_hooks import hooks_of

_HELD = ("_modules", *HOOKS)
"""Dicts that user code may write to itself."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EVERYWHERE = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_PATCHED = (
    (torch.nn.Module, "__delattr__"),
    (torch.nn.Module, "add_module"),
    (RemovableHandle, "__init__"),
    (RemovableHandle, "remove"),
)
_changes = 0
_followers = 0


def note_change() -> None:
    """Some module tree may have changed: a module was assigned, or a hook registered."""
    global _changes
    _changes += 1


def changes() -> int:
    """The number of changes that were noted."""
    return _changes


@contextlib.contextmanager
def following() -> Iterator[None]:
    """Note changes of the modules' structure in the block; assignments of modules are noted by those who follow assignments."""
    global _followers
    _followers += 1
    if _followers == 1:
        for owner, name in _PATCHED:
            setattr(owner, name, _noting(getattr(owner, name)))
    try:
        yield
    finally:
        _followers -= 1
        if not _followers:
            for owner, name in _PATCHED:
                setattr(owner, name, getattr(owner, name).__wrapped__)


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note_change()
        return original(*args, **kwargs)

    return noting


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """A block in which hooks are registered and removed again, which is no change."""
    global _changes
    before = _changes
    yield
    _changes = before


class ModuleStructure:
    """A detector of changes in the structure of a module tree, at the price of a comparison.

    Args:
        module: the root of the tree.

    Attributes:
        snapshot: stands for the structure; another object when it has changed.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._kept: dict[int, Any] = {}  # an id must not be used twice
        self._seen = _changes
        self.snapshot = self._look()

    def changed(self) -> bool:
        """Whether it has, since this was asked last."""
        if self._seen == _changes and not self._held.changed():
            return False
        self._seen = _changes
        now = self._look()
        if now == self.snapshot:
            return False
        self.snapshot = now
        return True

    def _look(self) -> tuple[Hashable, ...]:
        found = []
        kept = [module.__dict__ for module in self._module.modules()]
        everywhere = [vars(torch.nn.modules.module)[name] for name in _EVERYWHERE]
        held_by_modules = [held[name] for held in kept for name in _HELD if name in held]
        self._held = IdentityCheck((one, one, False) for one in (*held_by_modules, *everywhere))
        found.append(tuple(id(hook) for hooks in everywhere for hook in hooks.values()))
        self._kept.update((id(hook), hook) for hooks in everywhere for hook in hooks.values())
        for path, module in self._module.named_modules():
            hooks = [hook for kind in _HOOKS for hook in module.__dict__.get(kind, {}).values()]
            tensors = {name: one for name, one in (*module._parameters.items(), *module._buffers.items()) if one is not None}
            with _unnoticed():
                hooks += [hook for one in tensors.values() for hook in hooks_of(one).all]
            # Those that were there when the run began are taken over where they are assigned: only that they are there counts.
            others = {name: one for name, one in tensors.items() if not hasattr(one, "_live")}
            named = [(name, id(others[name]) if name in others else 0) for name in tensors]
            self._kept.update((id(one), one) for one in (module, *hooks, *others.values()))
            found.append((path, id(module), tuple(map(id, hooks)), tuple(named)))
        return tuple(found)
