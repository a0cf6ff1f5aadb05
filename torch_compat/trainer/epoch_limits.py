"""Limits of the number of epochs of a fit, where none were given."""

from __future__ import annotations

from typing import Any

from torch_compat.callbacks.timer import Timer
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning


def epoch_limits(
    min_steps: int | None, max_steps: int, min_epochs: int | None, max_epochs: int | None, trainer: Any
) -> tuple[int, int]:
    """``min_epochs`` and ``max_epochs`` of a fit, from all four limits: 1000 epochs where nothing limits them."""
    if max_epochs is None:
        if max_steps == -1 and not any(isinstance(one, Timer) for one in trainer.callbacks):
            rank_zero_warn(
                "`max_epochs` was not set. Setting it to 1000 epochs. `max_epochs=-1` trains without end.",
                category=PossibleUserWarning,
            )
            max_epochs = 1000
        else:
            max_epochs = -1
    if min_epochs is None and min_steps is not None:
        min_epochs = 1
    return min_epochs or 0, max_epochs
