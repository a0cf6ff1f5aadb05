"""What cannot be had together with optimizer state in the memory of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_compat.callbacks.non_finite_guard import guard_of
from torch_compat.functional.optimizers import FunctionalOptimizer
from torch_compat.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


def check_offloaded(trainer: Trainer, functional: FunctionalOptimizer | None) -> None:
    """Before a run whose strategy says ``offload="optimizer"``.

    Args:
        functional: its only optimizer, automatically stepped; None otherwise.

    Raises:
        MisconfigurationException: the update does not go parameter by parameter.
    """
    guard = guard_of(trainer.callbacks)
    if functional is None:
        why = "manual optimization and several optimizers update in the middle of the step; use automatic optimization"
    elif not functional.by_parameter:
        name = type(functional.optimizer).__name__
        why = f"{name} is captured as a whole; use an optimizer of torch.optim itself (not a subclass), such as AdamW"
    elif trainer.scaler is not None:
        why = "precision='16-mixed' takes updates back; use 'bf16-mixed'"
    elif guard is not None and guard.skip:
        why = "NonFiniteGuard takes updates back; let it stop the run instead of skipping"
    else:
        return
    raise MisconfigurationException(f"{type(trainer.strategy).__name__}(offload='optimizer'): {why}")
