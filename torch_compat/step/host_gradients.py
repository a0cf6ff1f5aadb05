"""Gradients that autograd on the host adds to parameters on a mesh: ``loss.backward()`` in a hook, a penalty beside a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle


class HostGradients:
    """Hooks where autograd of the host reaches parameters, which in its graphs are leaves like any others.

    Args:
        params: those that are followed, of whatever dtype.
        add: called with a parameter and the gradient that autograd has left there. It does not keep its object alive.
    """

    def __init__(self, params: Iterable[torch.Tensor], add: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        hook = _weakly(add)
        self._handles = [_anchor(param, hook) for param in params if param.is_floating_point() or param.is_complex()]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _anchor(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register the hook on a parameter, which may be frozen for now: torch refuses those otherwise."""
    with torch._C.DisableTorchFunctionSubclass():
        flag = param.requires_grad
        try:
            return param.requires_grad_().register_post_accumulate_grad_hook(hook)
        finally:
            param.requires_grad_(flag)


def _weakly(add: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """A hook that does not keep the object of ``add``: torch holds hooks where Python's collector cannot see them."""
    reference = weakref.WeakMethod(add)

    def hook(param: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
        if (found := reference()) is not None and grad is not None:
            found(param, grad)

    return hook
