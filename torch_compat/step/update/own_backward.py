"""The user's Python in a backward pass: captured with ``training_step``, though hooks of the host come between the two."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_compat.run import hook_calls as call
from torch_compat.step.guards.ahead_of_time import ahead_of_time
from torch_compat.step.run_context import RunContext
from torch_compat.utilities.overrides import overrides
from xlatrain.bridge.errors import CaptureError

_BEFORE = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")


def own_backward(run: RunContext) -> Callable[[torch.Tensor, Callable[..., None]], Any] | None:
    """The backward of the strategy, a plugin or the module, for captured steps; None where nobody overrides torch's."""
    own = call.has_own("backward", run.lightning_module)
    if own or run.strategy.overrides("backward") or overrides(run.precision_plugin, "backward"):
        return functools.partial(_captured, run)
    return None


def _captured(run: RunContext, loss: torch.Tensor, differentiate: Callable[..., None]) -> None:
    """The backward pass while a step is captured; the hooks around it run on the host."""
    mesh_run = run.strategy._mesh_run
    own = call.has_own("backward", run.lightning_module)
    mesh_run.backward = functools.partial(call.module_hook, run, "backward") if own else differentiate
    mesh_run.gradients_only = True
    try:
        run.strategy.backward(loss, run.optimizers[0] if run.optimizers else None)
    finally:
        mesh_run.backward, mesh_run.gradients_only = None, False


def hook_before(run: RunContext) -> str | None:
    """The hook that somebody overrides, of those that come before a backward pass; a mock has it once it was asked."""
    owners = (run.lightning_module, *run.callbacks)
    return next((one for one in _BEFORE if any(call.has_own(one, owner) for owner in owners)), None)


@contextlib.contextmanager
def after_hooks(run: RunContext, hook: str | None) -> Iterator[None]:
    """A captured backward pass, whose Python runs before the hooks that come before it are called.

    Args:
        hook: one of these, see :func:`hook_before`.

    Raises:
        CaptureError: there are such hooks, and the block has effects on the host, or reads what they may have changed.
    """
    recorder = run.executor.recorder
    if hook is None or recorder is None:  # nothing is captured
        yield
        return
    of_module = call.has_own("backward", run.lightning_module)
    who = f"backward, which {type(run.lightning_module).__name__} or a plugin overrides," if of_module else "the backward pass"

    def refusal(what: str) -> CaptureError:
        return CaptureError(
            f"{who} {what}, and {hook} is called before it: in a compiled step it would be called after it. Do so in "
            "on_after_backward, or leave the hook out"
        )

    with ahead_of_time(refusal):
        yield
