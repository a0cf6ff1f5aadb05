"""The interval at which callbacks that write to loggers by themselves do so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


def should_log(trainer: Trainer, batches_done: int) -> bool:
    """Whether the batch after ``batches_done`` others is one that is logged: every ``log_every_n_steps``-th, and the last."""
    every = trainer.log_every_n_steps
    return every != 0 and ((batches_done + 1) % every == 0 or trainer.should_stop)
