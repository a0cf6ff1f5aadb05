"""Manual optimization, compiled: the whole ``training_step`` with its backward passes and optimizer steps is one program.

So is automatic optimization with several optimizers, and with loss scaling where hooks see gradients.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch_compat.step.capture.cached_program import NO_FACTS, NamedStatic
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.mesh_steps import UpdatingStep
from torch_compat.step.optimizers.host_part import HostPart
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.run_context import RunContext
from torch_compat.step.update.user_step import UserStep


class ManualOptimization:
    """Runs ``training_step`` with backward passes, optimizer steps and the hooks around them.

    Args:
        run: the run.
        steps: the compiled executor.
        optimizers: what ``configure_optimizers`` returned, in pure form.
    """

    def __init__(self, run: RunContext, steps: MeshStepRunner, optimizers: OptimizerSet) -> None:
        self._run = run
        self._steps = steps
        self._user = UserStep(run, run.optimizers, contextlib.nullcontext)
        self._host = HostPart(optimizers, steps.model.replicate)
        steps.model.gradients.are_kept = True

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """Run a batch; ``stepped`` matters to automatic optimization only."""
        placed = self._steps.place(batch)
        host_values = self._run.executor.counters(batch_idx)

        def user_step(batch: Any, tracer: ScalarTracer) -> Any:
            self._user.scaling = tracer.loss_scale
            batch_idx: Any = tracer.counter("batch_idx")
            if self._user.steps_once:
                return self._user.automatic(batch, batch_idx, stepped)
            return self._user.manual(batch, batch_idx)

        facts, scaler = self._facts(stepped), self._run.scaler
        step = UpdatingStep(self._steps, placed, self._host, host_values, user_step, facts=facts, scaler=scaler)
        outcome = self._steps.run(step)
        self._run.fit_loop.progress.global_step += step.steps
        self._user.hooks.after_training_step()
        return outcome

    def _facts(self, stepped: bool) -> NamedStatic:
        if not self._user.steps_once:
            return NO_FACTS
        accumulate = self._run.accumulate_grad_batches
        return NamedStatic((("whether the optimizer steps", stepped), ("accumulate_grad_batches", accumulate)))
