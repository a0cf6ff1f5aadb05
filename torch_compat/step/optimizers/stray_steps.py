"""Optimizers that a step steps and nobody has given to the run: what is left in their state is taken back, and refused."""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xlatrain.bridge.errors import user_line

_Kept = tuple[Any, dict[Any, dict[Any, Any]], str | None]


@contextlib.contextmanager
def stray_steps_refused(
    managed: Collection[torch.optim.Optimizer], refuse: Callable[[str, str | None], NoReturn]
) -> Iterator[None]:
    """While a step is captured: look at the state of other optimizers that it steps, which are followed by nobody.

    One that the step makes itself, as an inner loop does, is gone with it, and so is its state.

    Args:
        managed: optimizers whose state is followed.
        refuse: told what the step does, and in which line of the user's.
    """
    known = set(map(id, managed))
    met: dict[int, _Kept] = {}

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in known and id(optimizer) not in met:
            state = {key: dict(held) for key, held in optimizer.state.items()}
            met[id(optimizer)] = (weakref.ref(optimizer), state, user_line(traceback.extract_stack()))

    handle = register_optimizer_step_pre_hook(before)
    found, line = "", None
    try:
        yield
    finally:
        handle.remove()
        if any(reference() is not None for reference, _, _ in met.values()):
            gc.collect()
        for reference, state, where in met.values():
            if kind := _put_back(reference(), state):
                found, line = kind, where
    if found:
        refuse(f"steps an optimizer ({found}) that configure_optimizers did not return, and whose state nothing follows", line)


def _put_back(optimizer: torch.optim.Optimizer | None, state: dict[Any, dict[Any, Any]]) -> str:
    """The class of an optimizer whose state was another before, which it is again; empty where it has none, or the same."""
    if optimizer is None:
        return ""
    now = {key: dict(held) for key, held in optimizer.state.items()}
    same = now.keys() == state.keys() and all(_is_same(now[key], held) for key, held in state.items())
    if same:
        return ""
    optimizer.state.clear()
    optimizer.state.update(state)
    return type(optimizer).__name__


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return now.keys() == before.keys() and all(now[key] is before[key] for key in before)
