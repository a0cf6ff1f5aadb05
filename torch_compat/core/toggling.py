"""Toggling of the parameters that require gradients while one of several optimizers is worked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def take_requires_grad(optimizers: Sequence[Any], active: Any) -> dict[Tensor, bool]:
    """Switches ``requires_grad`` off for every optimizer's parameters but the active one's; returns what each had before."""
    state: dict[Tensor, bool] = {}
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            if parameter not in state:
                state[parameter] = parameter.requires_grad
                parameter.requires_grad_(False)
    for parameter in _parameters(active):
        if parameter in state:
            parameter.requires_grad_(state[parameter])
    return state


def restore_requires_grad(optimizers: Sequence[Any], active: Any, state: dict[Tensor, bool]) -> None:
    """Undoes :func:`take_requires_grad` for the parameters of the other optimizers (the active one's were never changed)."""
    inner = _inner(active)
    for optimizer in optimizers:
        if _inner(optimizer) is inner:
            continue
        for parameter in _parameters(optimizer):
            if parameter in state:
                parameter.requires_grad_(state[parameter])


def _inner(optimizer: Any) -> Any:
    """The torch optimizer inside a ``LightningOptimizer``."""
    return getattr(optimizer, "_optimizer", optimizer)


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def noting_toggled(module: torch.nn.Module) -> Callable[[], None]:
    """A function that puts back the flags that ``toggle_optimizer`` has noted by now, for a step that is to run again."""
    noted = [(one, vars(one)[_NOTED]) for one in module.modules() if _NOTED in vars(one)]

    def put_back() -> None:
        for one, flags in noted:
            vars(one)[_NOTED] = flags

    return put_back


_NOTED = "_param_requires_grad_state"
