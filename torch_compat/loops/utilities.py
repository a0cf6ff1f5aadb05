"""Helpers of loops. API: ``lightning.pytorch.loops.utilities``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

from torch_compat.refused import refusing
from torch_compat.utilities.rank_zero import rank_zero_warn


def check_finite_loss(loss: torch.Tensor | None) -> None:
    """Nothing, where the loss is finite or None.

    Raises:
        ValueError: it is NaN or infinite.
    """
    if loss is not None and not torch.isfinite(loss).all():
        raise ValueError(f"The loss returned in `training_step` is {loss}.")


def _parse_loop_limits(
    min_steps: int | None, max_steps: int, min_epochs: int | None, max_epochs: int | None, trainer: Any
) -> tuple[int, int]:
    """``min_epochs`` and ``max_epochs`` of a fit, from all four limits: 1000 epochs where nothing limits them."""
    if max_epochs is None:
        if max_steps == -1 and not any(isinstance(one, _timer()) for one in trainer.callbacks):
            rank_zero_warn(
                "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit, set `max_epochs=-1`."
            )
            max_epochs = 1000
        else:
            max_epochs = -1
    if min_epochs is None and min_steps is not None:
        min_epochs = 1
    return min_epochs or 0, max_epochs


def _timer() -> type:
    from torch_compat.callbacks.timer import Timer

    return Timer


@contextlib.contextmanager
def _block_parallel_sync_behavior(strategy: Any, block: bool = True) -> Generator[None, None, None]:
    """Around backward passes that need no synchronisation. XLA places the reductions: nothing to block."""
    yield


def _is_max_limit_reached(current: int, maximum: int = -1) -> bool:
    """Whether a limit is there (not -1) and reached."""
    return maximum != -1 and current >= maximum


_OWN_LOOP = "the loops run themselves: call trainer.fit, validate, test or predict"
__getattr__ = refusing(
    "lightning.pytorch.loops.utilities",
    {
        "_reset_progress": _OWN_LOOP,
        "_select_data_fetcher": _OWN_LOOP,
        "_no_grad_context": _OWN_LOOP,
        "_verify_dataloader_idx_requirement": _OWN_LOOP,
    },
)
