"""The kinds of steps that run on a mesh: what a program of theirs is made from, what it takes, and what becomes of the state.

:meth:`~torch_compat.step.mesh_step_runner.MeshStepRunner.run` runs a step of any kind: it finds the program, and runs another one
where a value that only the step knows came out otherwise than assumed.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np

from torch_compat.run.report import ExecutorLog
from torch_compat.step.capture.cached_program import NO_FACTS, Built, CachedProgram, NamedStatic
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.step_capture import StepBody, StepSpec, UserCall
from torch_compat.step.capture.user_steps import evaluation_body, training_body, updating_body
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimizers.host_actions import HostPlan, StepInline
from torch_compat.step.optimizers.host_part import HostPart
from torch_compat.step.placed_batch import PlacedBatch
from torch_compat.step.planned import Planned
from torch_compat.step.program_builder import ProgramBuilder
from torch_compat.step.step_services import StepServices
from xlatrain.bridge.errors import CaptureError
from xlatrain.step.loss_scale import LossScaler
from xlatrain.step.stacking import Stacking


class StepsRunner(Protocol):
    """The runner of such steps, :class:`~torch_compat.step.mesh_step_runner.MeshStepRunner`, as they see it."""

    services: StepServices
    programs: ProgramBuilder
    planned: Planned | None
    finite: Any
    fresh: dict[str, Any]

    @property
    def model(self) -> ModelState: ...

    @property
    def log(self) -> ExecutorLog: ...

    def spec(self, body: StepBody, batch: PlacedBatch, call: UserCall, *, grad: bool = True, **options: Any) -> StepSpec: ...

    def count_evaluation(self) -> int: ...

    def take_written(self, params: Any, buffers: Any, stacking: Stacking | None = None) -> None: ...


class Update(Protocol):
    """The update of automatic optimization, :class:`~torch_compat.step.optimization.planned_update.PlannedUpdate`, seen here."""

    def numbers(self) -> tuple[Any, Hashable]: ...

    def carry_out(self, plan: HostPlan, host_values: HostValues, *, undoable: bool) -> Callable[[], None] | None: ...


class MeshStep(ABC):
    """A step of one batch. Programs give ``(new state, outputs)``.

    Attributes:
        name: of the user's method.
        static: what else than batch and host decides about the program.
        batch: on the mesh.
        host_values: the loop's counters.
        spec: how the step's Python is run.
        replaces_state: programs are given the state to make the new one of; they take nothing over where they assumed wrongly.
    """

    name: str
    static: Hashable
    spec: StepSpec
    replaces_state = True

    def __init__(self, runner: StepsRunner, batch: PlacedBatch, host_values: HostValues) -> None:
        self._runner, self.batch, self.host_values = runner, batch, host_values

    @abstractmethod
    def build(self, step: CapturedStep, batch: PlacedBatch) -> Built:
        """The program of a captured step, for batches like ``batch``."""

    @abstractmethod
    def arguments(self, program: CachedProgram) -> tuple[Any, ...]:
        """The arguments of a program, the state first."""

    def values(self, outputs: Any) -> Any:
        """The packed scalars and the values, among a program's outputs."""
        return outputs

    def put_back(self, program: CachedProgram, state: Any) -> None:  # noqa: B027 — most programs take nothing
        """The program took nothing over, and gave the old state, which it had taken."""

    @abstractmethod
    def take(self, program: CachedProgram, new: Any, outputs: Any) -> None:
        """Take over what the program gave."""

    def undo(self) -> None:  # noqa: B027 — most steps do nothing there
        """Undo what the step has done on the host, since it does not run."""

    def finish(self, step: CapturedStep) -> None:  # noqa: B027 — as above
        """Do what follows on the host."""


class TrainingStep(MeshStep):
    """A training step with automatic optimization.

    Args:
        mode: ``"fused"`` (gradients and update), ``"accumulate"`` (gradients are added up), or ``"split"`` (gradients
            leave the program: the runner's ``show_gradients`` lets hooks see them, and the update is another program).
        accumulate: what the loss is divided by.
        update: gives the optimizer's options, numbers for the program and what else decides about it.
        host_values: the loop's counters.
        call: ``(batch, tracer) -> result``, the user's ``training_step``.
    """

    name = "training_step"

    def __init__(
        self,
        runner: StepsRunner,
        batch: PlacedBatch,
        mode: str,
        accumulate: int,
        update: Update,
        host_values: HostValues,
        call: UserCall,
    ) -> None:
        super().__init__(runner, batch, host_values)
        self._mode, self._accumulate, self._update = mode, accumulate, update
        self._hyper, self._flags = update.numbers()
        self._undo: Callable[[], None] | None = None
        self.static = (mode, accumulate, self._flags, runner.programs.plan_number)
        services, scaler = runner.services, runner.programs.plan.scaler
        options = {"scaler": scaler, "backward": services.backward, "around_backward": services.around_backward}
        self.spec = runner.spec(training_body(accumulate), batch, call, **options)
        self._carried: Any = None  # gradients of earlier batches, which a program that gives its own does not take

    def build(self, step: CapturedStep, batch: PlacedBatch) -> Built:
        return self._runner.programs.training(step, batch, self._mode, self._accumulate)

    def arguments(self, program: CachedProgram) -> tuple[Any, ...]:
        runner, plan = self._runner, program.step.optimizers.plan
        if plan.actions:
            undoable = program.runs == 0 or bool(program.step.scalars.assumed)
            self._undo = self._update.carry_out(plan, self.host_values, undoable=undoable)
            self._hyper, flags = self._update.numbers()
            if flags != self._flags:
                raise CaptureError(
                    f"training_step changes an option of its optimizer that is a constant of the program ({plan.text()}).\n"
                    "  Fix: do it in a hook outside of the step (on_train_batch_start, …)."
                )
        state = runner.model.stacked_state(program.stacking)
        self._carried = state.accumulated
        if self._mode == "split" and self._carried:
            state = dataclasses.replace(state, accumulated={})
        scalars, arrays = program.scalars(self.host_values), program.arrays(self.batch)
        args = (state, arrays, scalars, self._hyper) if self._mode == "fused" else (state, arrays, scalars)
        if runner.planned is not None and self._mode != "accumulate":
            program.program = runner.planned.compile(program.program, args, self.batch.size, self._accumulate)
            runner.planned = None
        return args

    def values(self, outputs: Any) -> Any:
        return outputs[0] if self._mode == "fused" else outputs[1] if self._mode == "split" else outputs

    def put_back(self, program: CachedProgram, state: Any) -> None:
        self.undo()
        self._runner.model.put_back(self._with_carried(state), program.stacking)

    def undo(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def take(self, program: CachedProgram, new: Any, outputs: Any) -> None:
        runner = self._runner
        if self._mode == "fused":
            runner.finite = None if runner.programs.plan.guard is None else outputs[1][1]
            runner.model.gradients.differentiated = program.step.differentiated
        elif self._mode == "split":
            runner.fresh = outputs[0]
        runner.model.advance(self._with_carried(new), program.stacking, program.step.changed)
        runner.log.steps += 1

    def _with_carried(self, state: Any) -> Any:
        return dataclasses.replace(state, accumulated=self._carried) if self._mode == "split" else state


class UpdatingStep(MeshStep):
    """A training step that runs backward and its optimizers itself.

    Args:
        host: does what steps do on the host; the state of its optimizers is ``model.state.opt_state``.
        host_values: the host's values.
        call: ``(batch, tracer) -> result``, the user's ``training_step`` with the hooks in it.
        name: of the step.
        facts: what else decides about the program.
        scaler: loss scaling of the step's backward passes and optimizer steps, or None.

    Attributes:
        steps: how often optimizers stepped, as ``global_step`` counts, once it has run.
    """

    def __init__(
        self,
        runner: StepsRunner,
        batch: PlacedBatch,
        host: HostPart,
        host_values: HostValues,
        call: UserCall,
        name: str = "training_step",
        facts: NamedStatic = NO_FACTS,
        scaler: LossScaler | None = None,
    ) -> None:
        super().__init__(runner, batch, host_values)
        runner.model.push_writes()
        self.name, self.steps = name, 0
        self.static = facts.joined(("manual", tuple(runner.model.state.accumulated), host.optimizers.static_key()))
        states = host.optimizers.inline_inputs(runner.model.state.opt_state)
        self.spec = runner.spec(updating_body, batch, call, with_gradients=True, scaler=scaler, states=states)
        self._facts, self._host = facts, host
        host.begin()

    def build(self, step: CapturedStep, batch: PlacedBatch) -> Built:
        return self._runner.programs.updating(step, batch, self._host.optimizers, self._facts)

    def arguments(self, program: CachedProgram) -> tuple[Any, ...]:
        model, step = self._runner.model, program.step
        assumed = bool(step.scalars.assumed)
        hypers = self._host.run(step.optimizers.plan, self.host_values, undoable=program.runs == 0 or assumed)
        scalars = program.scalars(self.host_values)
        if model.state.accumulated and not step.reads_gradients and not assumed:
            model.gradients.drop()
        return (model.state, program.arrays(self.batch), scalars, hypers)

    def put_back(self, program: CachedProgram, state: Any) -> None:
        self._host.undo()
        self._runner.model.put_back(state)

    def take(self, program: CachedProgram, new: Any, outputs: Any) -> None:
        self._runner.model.advance(new, changed=program.step.changed)
        self._runner.log.steps += 1
        for index, inline in self._host.optimizers.inline.items():
            inline.adopt(program.step.optimizers.layouts[index])

    def undo(self) -> None:
        self._host.undo()

    def finish(self, step: CapturedStep) -> None:
        self.steps = step.scalars.moved.get("global_step", 0)
        for called in step.optimizers.calls:
            self._host.optimizers.optimizers[called.index].run_post_hooks()
        for action in step.optimizers.plan.actions:
            if isinstance(action, StepInline):
                self._host.optimizers.optimizers[action.index].run_post_hooks()


class EvaluationStep(MeshStep):
    """A validation, test or predict step.

    Args:
        name: of the method.
        static: what else decides about the program (the index of the dataloader).
        host_values: the loop's counters.
        call: ``(batch, tracer) -> result``, the user's method.
    """

    def __init__(
        self, runner: StepsRunner, name: str, batch: PlacedBatch, static: Hashable, host_values: HostValues, call: UserCall
    ) -> None:
        super().__init__(runner, batch, host_values)
        self.replaces_state = False
        self.name, self.static = name, static
        self.spec = runner.spec(evaluation_body, batch, call, grad=False)
        self._draws = np.int32(-runner.count_evaluation())

    def build(self, step: CapturedStep, batch: PlacedBatch) -> Built:
        return self._runner.programs.evaluation(step, batch)

    def arguments(self, program: CachedProgram) -> tuple[Any, ...]:
        state = self._runner.model.stacked_state(program.stacking)
        scalars = program.scalars(self.host_values)
        return (state.params, state.buffers, state.key, self._draws, program.arrays(self.batch), scalars)

    def take(self, program: CachedProgram, new: Any, outputs: Any) -> None:
        if any(new):
            params, buffers = new
            self._runner.take_written(params, buffers, program.stacking)
