"""An epoch in which ``training_step`` runs, but nothing is learned: what SWA needs to compute BatchNorm's statistics."""

from __future__ import annotations

from typing import Any

from torch_compat.step.capture.loss import closure_loss, outputs_with
from torch_compat.step.eager.eager import EagerOptimization
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.run_context import RunContext
from torch_compat.utilities.host_arrays import to_torch


class ForwardOnly:
    """The optimization of an epoch that learns nothing, in place of ``trainer.executor.optimization``.

    Lightning skips zero_grad and backward in that epoch, but still takes the optimizer step of its last batch, with the gradients
    that the last training batch left behind. So does this.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._optimization: Any = run.executor.optimization
        run.executor.optimization = self

    def finish(self) -> None:
        """Training goes on as before."""
        self._run.executor.optimization = self._optimization

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """Run ``training_step`` on one batch, and an optimizer step if ``stepped``."""
        outcome = self._forward(batch, batch_idx)
        if stepped and self._run.optimizers:
            self._run.fit_loop.take_logs(outcome)  # hooks of the optimizer step see them
            self._optimization.step_again(lambda: outcome.result.get("loss"), batch_idx)
        return outcome

    def _forward(self, batch: Any, batch_idx: int) -> StepOutcome:
        executor = self._run.executor
        outcome = executor.evaluate("training_step", batch, (batch_idx,))
        if executor.optimization is not self:  # the step could not be compiled, so the rest of the run is eager
            self._follow_fall_back()
        accumulate, make = self._run.accumulate_grad_batches, outcome.make_result
        outcome.make_result = lambda: _training_result(make(), accumulate)
        return outcome

    def _follow_fall_back(self) -> None:
        kept = getattr(self._optimization, "kept_gradients", None) or {}
        self._optimization = self._run.executor.optimization
        self._run.executor.optimization = self
        assert isinstance(self._optimization, EagerOptimization)
        params = dict(self._run.lightning_module.named_parameters())
        for name, grad in kept.items():
            params[name].grad = None if grad is None else to_torch(grad, params[name].dtype)


def _training_result(output: Any, accumulate: int) -> dict[str, Any]:
    """The ``outputs`` that hooks get of a training batch."""
    loss = closure_loss(output)
    if loss is None:
        return {}
    return outputs_with(loss.detach() / accumulate, output)
