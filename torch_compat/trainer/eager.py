"""The eager executor: runs a module's steps op by op in plain torch on this process's CPU.

It is what stock Lightning does on one device with the global batch, with the same hooks and logs: the fallback for steps that
cannot be compiled, and for manual optimization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_compat.functional.batches import first_batch_size, flatten_batch, map_tensors
from torch_compat.functional.step import closure_loss
from torch_compat.trainer import call
from torch_compat.trainer.outcome import StepOutcome
from torch_compat.trainer.report import ExecutorLog
from torch_compat.utilities.exceptions import MisconfigurationException

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
        precision: converts batches and surrounds the forward pass.
        reason: why steps are not compiled.
    """

    executor = "eager"

    def __init__(self, precision: Precision, reason: str) -> None:
        self.log = ExecutorLog(fallback=reason)
        self.copy_batches = False
        self._precision = precision

    def place(self, batch: Any) -> HostBatch:
        """The batch itself, in the run's precision."""
        leaves, _ = flatten_batch(batch)
        return HostBatch(map_tensors(self._precision.convert_input, batch), first_batch_size(leaves) or 1)

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
        self._optimizers = optimizers
        trainer.strategy._run_backward = self._backward
        for wrapped in trainer.strategy._lightning_optimizers:
            wrapped._strategy = self
            if not trainer.lightning_module.automatic_optimization:
                wrapped._on_after_step = self._count_step

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """One batch: gradients, and the update if ``stepped``."""
        trainer = self._trainer
        placed = self._steps.place(batch)
        trainer.fit_loop.results.batch_size = placed.size
        self._steps.log.steps += 1
        if trainer.lightning_module.automatic_optimization:
            outputs = self._automatic(placed, batch_idx, stepped)
        else:
            outputs = self._manual(placed, batch_idx)
        return StepOutcome((), _NOTHING, lambda: outputs, placed.size)

    # -- automatic -------------------------------------------------------------------------------------------------

    def _automatic(self, placed: HostBatch, batch_idx: int, stepped: bool) -> dict[str, Any]:
        trainer = self._trainer
        found: dict[str, Any] = {}

        def closure() -> torch.Tensor | None:
            output = self._call_training_step(placed.batch, batch_idx)
            loss = closure_loss(output)
            found.clear()
            if loss is not None:
                loss = loss / trainer.accumulate_grad_batches
                extra = dict(output) if isinstance(output, dict) else {}
                found.update({**extra, "loss": loss.detach().clone()})
            if batch_idx % trainer.accumulate_grad_batches == 0 and self._optimizers:
                call.hooks(trainer, "on_before_zero_grad", self._optimizers[0])
                call.module_hook(trainer, "optimizer_zero_grad", trainer.current_epoch, batch_idx, self._optimizers[0])
            if loss is not None:
                self._backward(loss)
            return loss

        if not stepped or not self._optimizers:
            closure()
        else:
            optimizer = trainer.strategy._lightning_optimizers[0]
            call.module_hook(trainer, "optimizer_step", trainer.current_epoch, batch_idx, optimizer, closure)
            self._count_step()
        return found

    def _call_training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer = self._trainer
        with self._steps._precision.forward_context():
            return call.step(trainer, "training_step", batch, batch_idx)

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        call.hooks(trainer, "on_before_backward", loss)
        call.module_hook(trainer, "backward", loss, *args, **kwargs)
        call.hooks(trainer, "on_after_backward")

    # -- manual ----------------------------------------------------------------------------------------------------

    def _manual(self, placed: HostBatch, batch_idx: int) -> dict[str, Any]:
        output = self._call_training_step(placed.batch, batch_idx)
        if isinstance(output, dict):
            return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in output.items()}
        if isinstance(output, torch.Tensor):
            return {"loss": output.detach()}
        if output is not None:
            raise MisconfigurationException(
                "in manual optimization, `training_step` must either return a Tensor or have no return, not "
                f"{type(output).__name__}"
            )
        return {}

    # -- what LightningOptimizer and manual_backward call ----------------------------------------------------------

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """``optimizer.step(closure)``: closure, hooks, clipping, update."""
        trainer = self._trainer
        automatic = trainer.lightning_module.automatic_optimization

        def with_hooks() -> Any:
            loss = closure()
            call.hooks(trainer, "on_before_optimizer_step", optimizer)
            if automatic:
                call.module_hook(
                    trainer,
                    "configure_gradient_clipping",
                    optimizer,
                    gradient_clip_val=trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )
            return loss

        return optimizer.step(closure=with_hooks, **kwargs)

    def _count_step(self) -> None:
        self._trainer.fit_loop.progress.global_step += 1
