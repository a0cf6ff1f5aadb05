"""Manual optimization, compiled: the whole ``training_step`` with its backward passes and optimizer steps is one program.

So is automatic optimization with several optimizers, and with loss scaling where hooks see gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from torch_compat.step.capture.cached_program import NO_FACTS, NamedStatic
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.optimizers.traced import TracedOptimizers
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.run_context import RunContext
from torch_compat.step.update.user_step import UserStep
from xlatrain.bridge.errors import BridgeError


class ManualOptimization:
    """Runs ``training_step`` with backward passes, optimizer steps and the hooks around them.

    Args:
        run: the run.
        steps: the compiled executor.
        optimizers: what ``configure_optimizers`` returned, in pure form.
        traced: puts stand-ins of them in place while a step is captured.
    """

    def __init__(self, run: RunContext, steps: MeshStepRunner, optimizers: OptimizerSet, traced: TracedOptimizers) -> None:
        self._run = run
        self._steps = steps
        self._optimizers = optimizers
        self._traced = traced
        self._user = UserStep(run, run.optimizers, contextlib.nullcontext)
        self._hypers: list[tuple[np.ndarray, Any]] = []
        self._undo: Callable[[], None] | None = None
        steps.model.carries_gradients = True

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """Run a batch; ``stepped`` matters to automatic optimization only."""
        placed = self._steps.place(batch)
        host_values = self._run.executor.counters(batch_idx)

        def prepare(step: CapturedStep, undoable: bool) -> list[Any]:
            return self._prepare(step, host_values, undoable)

        def user_step(batch: Any, tracer: ScalarTracer) -> Any:
            self._user.scaling = tracer.loss_scale
            batch_idx: Any = tracer.counter("batch_idx")
            if self._user.steps_once:
                return self._user.automatic(batch, batch_idx, stepped)
            return self._user.manual(batch, batch_idx)

        self._undo, scaler = None, self._run.scaler
        try:
            outcome, step = self._steps.train_manually(
                placed,
                self._optimizers,
                host_values,
                user_step,
                prepare,
                self._undo_host_actions,
                facts=self._facts(stepped),
                scaler=scaler,
            )
        except BridgeError:
            self._undo_host_actions()  # the step did not run, and runs eagerly now
            raise
        self._finish(step)
        self._user.hooks.after_training_step()
        return outcome

    def _facts(self, stepped: bool) -> NamedStatic:
        if not self._user.steps_once:
            return NO_FACTS
        accumulate = self._run.accumulate_grad_batches
        return NamedStatic((("whether the optimizer steps", stepped), ("accumulate_grad_batches", accumulate)))

    def _undo_host_actions(self) -> None:
        """Undo what :meth:`_prepare` did, if it may have to be."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _prepare(self, step: CapturedStep, host_values: HostValues, undoable: bool) -> list[Any]:
        """Carry out the step's host actions; gives the options of its optimizer steps on the mesh."""
        plan, optimizers = step.optimizers.plan, self._optimizers.optimizers
        if undoable and plan.changes_options:
            self._undo = plan.undo(optimizers)
        hypers = plan.run(host_values, optimizers)
        for position, vector in enumerate(hypers):
            if position == len(self._hypers):
                self._hypers.append((vector, self._steps.model.replicate(vector)))
            elif self._hypers[position][0] is not vector:
                self._hypers[position] = (vector, self._steps.model.replicate(vector))
        return [placed for _, placed in self._hypers[: len(hypers)]]

    def _finish(self, step: CapturedStep) -> None:
        """Show the effects of an executed step on the host."""
        for called in step.optimizers.calls:
            self._optimizers.optimizers[called.index].run_post_hooks()
        self._run.fit_loop.progress.global_step += step.scalars.moved.get("global_step", 0)
