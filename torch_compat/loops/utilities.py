"""Helpers of loops. API: ``lightning.pytorch.loops.utilities``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

from torch_compat.trainer.epoch_limits import epoch_limits as _parse_loop_limits  # noqa: F401  stock's name for it


def check_finite_loss(loss: torch.Tensor | None) -> None:
    """Check that the loss is finite or None.

    Raises:
        ValueError: it is NaN or infinite.
    """
    if loss is not None and not torch.isfinite(loss).all():
        raise ValueError(f"The loss returned in `training_step` is {loss}, which is not finite.")


@contextlib.contextmanager
def _block_parallel_sync_behavior(strategy: Any, block: bool = True) -> Generator[None, None, None]:
    """The context of backward passes that need no synchronisation. XLA places the reductions, so there is nothing to block."""
    yield


def _is_max_limit_reached(current: int, maximum: int = -1) -> bool:
    """Whether a limit is there (not -1) and reached."""
    return maximum != -1 and current >= maximum
