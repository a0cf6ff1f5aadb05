"""Hooks with the parameters of their era: ``optimizer_idx`` and its like are passed where an override asks for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def accepts(method: Callable[..., Any], name: str) -> bool:
    """Whether a bound method has a parameter ``name``."""
    return name in inspect.signature(method).parameters


def call_optimizer_zero_grad(module: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int) -> Any:
    """``module.optimizer_zero_grad`` in the form of its era."""
    method = module.optimizer_zero_grad
    if accepts(method, "optimizer_idx"):
        return method(epoch, batch_idx, optimizer, optimizer_idx)
    return method(epoch, batch_idx, optimizer)
