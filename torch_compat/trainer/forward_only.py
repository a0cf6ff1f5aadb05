"""An epoch in which ``training_step`` runs, but nothing is learned: what SWA needs to compute BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_compat.step.capture.loss import closure_loss
from torch_compat.step.eager.eager import EagerOptimization
from torch_compat.step.optimization.automatic import AutomaticOptimization
from torch_compat.step.outcome import StepOutcome
from torch_compat.utilities.host_arrays import to_torch

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class ForwardOnly:
    """The optimization of an epoch that learns nothing, in place of ``trainer.executor.optimization``.

    Lightning skips zero_grad and backward in that epoch, but still takes the optimizer step of its last batch, with the gradients
    that the last training batch left behind. So does this.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._optimization: Any = trainer.executor.optimization
        trainer.executor.optimization = self  # pyright: ignore[reportAttributeAccessIssue]

    def finish(self) -> None:
        """Training goes on as before."""
        self._trainer.executor.optimization = self._optimization

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """Run ``training_step`` on one batch, and an optimizer step if ``stepped``."""
        outcome = self._forward(batch, batch_idx)
        if stepped and self._trainer.optimizers:
            self._optimization.step_again(lambda: outcome.result.get("loss"), batch_idx)
        return outcome

    def _forward(self, batch: Any, batch_idx: int) -> StepOutcome:
        executor = self._trainer.executor
        outcome = executor.evaluate("training_step", batch, (batch_idx,))
        if executor.optimization is not self:  # the step could not be compiled, so the rest of the run is eager
            self._follow_fall_back()
        accumulate, make = self._trainer.accumulate_grad_batches, outcome.make_result
        outcome.make_result = lambda: _training_result(make(), accumulate)
        return outcome

    def _follow_fall_back(self) -> None:
        kept = getattr(self._optimization, "kept_gradients", None) or {}
        self._optimization = self._trainer.executor.optimization
        self._trainer.executor.optimization = self  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(self._optimization, EagerOptimization)
        params = dict(self._trainer.lightning_module.named_parameters())
        for name, grad in kept.items():
            params[name].grad = None if grad is None else to_torch(grad, params[name].dtype)


def keep_gradients(trainer: Trainer, keep: bool) -> None:
    """Whether the gradients of the next steps outlive them, for :class:`ForwardOnly`. Eager steps leave them in ``p.grad``."""
    if isinstance(optimization := trainer.executor.optimization, AutomaticOptimization):
        optimization.keeps_gradients = keep


def forget_gradients(trainer: Trainer) -> None:
    """The gradients that are left of earlier steps are None from here on."""
    if isinstance(optimization := trainer.executor.optimization, AutomaticOptimization):
        optimization.kept_gradients = None
    else:
        trainer.lightning_module.zero_grad()


def _training_result(output: Any, accumulate: int) -> dict[str, Any]:
    """The ``outputs`` that hooks get of a training batch."""
    loss = closure_loss(output)
    if loss is None:
        return {}
    return {**(output if isinstance(output, Mapping) else {}), "loss": loss.detach() / accumulate}
