"""The eager executor: runs a module's steps op by op in plain torch on this process's CPU.

It is what stock Lightning does on one device with the global batch, with the same hooks and logs: the fallback for steps that
cannot be compiled, and for manual optimization.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_compat.functional.batches import first_batch_size, flatten_batch
from torch_compat.trainer import call
from torch_compat.trainer.outcome import StepOutcome
from torch_compat.trainer.report import ExecutorLog
from torch_compat.trainer.user_step import UserStep

if TYPE_CHECKING:
    from torch_compat.plugins.precision import Precision
    from torch_compat.trainer.trainer import Trainer

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class HostBatch:
    """A batch on the host."""

    batch: Any
    size: int


class EagerSteps:
    """Runs steps on the host; ``self.log`` reaches the results directly.

    Args:
        precision: surrounds the forward pass.
        reason: why steps are not compiled.
    """

    executor = "eager"

    def __init__(self, precision: Precision, reason: str) -> None:
        self.log = ExecutorLog(fallback=reason)
        self.copy_batches = False
        self._precision = precision

    def forward_context(self) -> AbstractContextManager[Any]:
        """Around the user's steps."""
        return self._precision.forward_context()

    def place(self, batch: Any) -> HostBatch:
        """The batch itself, in the run's precision."""
        leaves, _ = flatten_batch(batch)
        return HostBatch(batch, first_batch_size(leaves) or 1)

    def evaluate(self, batch: HostBatch, step: Callable[[Any], Any]) -> StepOutcome:
        """Run one validation, test or predict step."""
        with torch.no_grad(), self._precision.forward_context():
            result = step(batch.batch)
        return StepOutcome((), _NOTHING, lambda: result, batch.size)


class EagerOptimization:
    """Automatic and manual optimization in plain torch.

    Args:
        trainer: the Trainer.
        steps: the executor.
        optimizers: what ``configure_optimizers`` returned.
    """

    def __init__(self, trainer: Trainer, steps: EagerSteps, optimizers: list[torch.optim.Optimizer]) -> None:
        self._trainer = trainer
        self._steps = steps
        self._user = UserStep(trainer, optimizers, steps.forward_context)

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """One batch: gradients, and the update if ``stepped``."""
        trainer = self._trainer
        placed = self._steps.place(batch)
        trainer.fit_loop.results.batch_size = placed.size
        self._steps.log.steps += 1
        if self._user.steps_once:
            outputs = self._user.automatic(placed.batch, batch_idx, stepped)
        else:
            outputs = self._user.manual(placed.batch, batch_idx)
        return StepOutcome((), _NOTHING, lambda: outputs, placed.size)

    def step_again(self, forward: Callable[[], Any], batch_idx: int) -> None:
        """One more optimizer step, after ``forward``, with the gradients that are there."""
        trainer = self._trainer
        optimizer = trainer.strategy._lightning_optimizers[0]
        call.module_hook(trainer, "optimizer_step", trainer.current_epoch, batch_idx, optimizer, forward)
        self._user.count_step()
