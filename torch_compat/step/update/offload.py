"""Checks that nothing in a run conflicts with optimizer state in the memory of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_compat.callbacks.non_finite_guard import guard_of
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.run_context import RunContext
from torch_compat.utilities.exceptions import MisconfigurationException


def check_offloaded(run: RunContext, optimizers: Sequence[FunctionalOptimizer]) -> None:
    """Check a run whose strategy has ``offload="optimizer"``, before it begins.

    Args:
        optimizers: all of the run.

    Raises:
        MisconfigurationException: the update does not go parameter by parameter.
    """
    if (why := captured_as_a_whole(optimizers) or _taken_back(run)) is not None:
        raise MisconfigurationException(f"{type(run.strategy).__name__}(offload='optimizer'): {why}")


def _taken_back(run: RunContext) -> str | None:
    """The reason why a whole update may be taken back, and what to do; None where nothing takes it back."""
    if run.scaler is not None:
        return "precision='16-mixed' takes updates back; use 'bf16-mixed'"
    guard = guard_of(run.callbacks)
    if guard is not None and guard.skip:
        return "NonFiniteGuard takes updates back; let it stop the run instead of skipping"
    return None


def captured_as_a_whole(optimizers: Iterable[FunctionalOptimizer]) -> str | None:
    """The reason why an optimizer's update does not go parameter by parameter, and what to do; None where all do."""
    for one in optimizers:
        if not one.by_parameter:
            name = type(one.optimizer).__name__
            return f"{name} is captured as a whole; use an optimizer of torch.optim itself (not a subclass), such as AdamW"
    return None
