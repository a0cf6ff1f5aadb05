"""The XLA programs of one runner's captured steps, for the update that it plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from jax.sharding import Mesh

from torch_compat.run.report import ExecutorLog
from torch_compat.step.capture.cached_program import Built
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.kept_graphs import settings
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.placed_batch import PlacedBatch
from torch_compat.step.programs import (
    UpdatingPrograms,
    evaluation_program,
    in_matmul_precision,
    training_program,
    updating_program,
)
from torch_compat.step.update.plan import UpdatePlan, update
from xlatrain.bridge.capture.capture import Capture
from xlatrain.bridge.capture.vocabulary import losses_of
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.lower.graph_text import graph_digest
from xlatrain.bridge.lower.kernels.chosen import kernels_of
from xlatrain.step.stacking import Stacking
from xlatrain.step.step import StepBuilder, no_update
from xlatrain.xla.stored_programs import StoredProgram, may_be_stored
from xlatrain.xla.told import told


class ProgramBuilder:
    """Makes the programs of steps of one module.

    Args:
        model: the module on the mesh.
        mesh: the mesh.
        log: told what of a step became a loop or a kernel.
        plans: the number of each update for which this and earlier runs made programs, which is added to.

    Attributes:
        plan: the update, loss scaling and check of gradients of training programs; assign another with :meth:`set_plan`.
        plan_number: of the plan; plans of one number make equal programs of a step.
    """

    def __init__(self, model: ModelState, mesh: Mesh, log: ExecutorLog, plans: dict[Hashable, int]) -> None:
        self.plan, self.plan_number, self._plans = UpdatePlan(None), -1, plans
        self._model, self._mesh, self._log = model, mesh, log
        self._updates: dict[Hashable, Callable[..., Any]] = {}  # by what else than arrays an update depends on
        self._updating = UpdatingPrograms()

    def set_plan(self, plan: UpdatePlan) -> None:
        """Plan the update of the training programs that are made from now on."""
        self.plan = plan
        self._updates.clear()
        key = plan.key
        self.plan_number = self._plans.setdefault(object() if key is None else key, len(self._plans))

    def forget(self) -> None:
        """Let go of the programs that serve several steps."""
        self._updates.clear()
        self._updating = UpdatingPrograms()

    def training(self, step: CapturedStep, batch: PlacedBatch, mode: str, accumulate: int) -> Built:
        """The program of a training step; for ``mode`` and ``accumulate`` see :class:`~.mesh_steps.TrainingStep`."""
        stacking = None if mode == "split" else self._stack(step)
        self._check_stages(step, stacking)
        builder = self._builder(step.capture.uses_random, stacking)
        staged = self._model.pipelining
        key = None if (plan := self.plan.key) is None else ("train", mode, accumulate, plan, builder.key, staged)
        return self._kept(step, batch, key, lambda: training_program(step, batch, mode, builder, staged), stacking)

    def updating(self, step: CapturedStep, batch: PlacedBatch, optimizers: OptimizerSet, facts: Hashable) -> Built:
        """The program of a training step that runs its optimizers itself.

        Args:
            facts: what else decides about the program.
        """
        self._check_stages(step, None)
        model, size = self._model, self._model.gradient_bytes()
        builder = StepBuilder(self._mesh, no_update, model.shardings, draws=step.capture.uses_random, gradient_bytes=size)
        step_optimizer = optimizers.update_from_host if model.offloads else optimizers.update
        others = (batch.key(), optimizers.static_key(), facts, model.requires_grad(), torch.get_float32_matmul_precision())
        return Built(self._updating.of(step, others, lambda: updating_program(step, batch, step_optimizer, builder)))

    def evaluation(self, step: CapturedStep, batch: PlacedBatch) -> Built:
        """The program of a validation, test or predict step."""
        _check_trains_nothing(step)
        shardings, stacking, staged = self._model.param_shardings, self._stack(step), self._model.pipelining
        key = ("evaluate", self._mesh, tuple(sorted(shardings.items())), stacking, staged)
        make = functools.partial(
            evaluation_program, step, batch, self._mesh, shardings, stacked=stacking is not None, pipelining=staged
        )
        return self._kept(step, batch, key, make, stacking)

    def call(self, step: CapturedStep, batch: PlacedBatch, what: Hashable, make: Callable[[], Callable[..., Any]]) -> Built:
        """The program of one call of a module, or of its backward pass.

        Args:
            what: all that decides about the program besides graph, batch, mesh and shardings.
            make: makes it; the program may not hold the module.
        """
        _check_trains_nothing(step)
        shardings, size = self._model.param_shardings, self._model.gradient_bytes()
        return self._kept(step, batch, (what, self._mesh, tuple(sorted(shardings.items())), size), make, None)

    def update(self, static: Hashable) -> Callable[..., Any]:
        """The program of the update alone; ``static`` is what else than arrays it depends on."""
        if static not in self._updates:
            self._updates[static] = self._builder().apply()
        return self._updates[static]

    def _builder(self, draws: bool = True, stacking: Stacking | None = None) -> StepBuilder:
        plan = self.plan
        run = in_matmul_precision(functools.partial(update, plan.frozen()))
        size = self._model.gradient_bytes()
        return StepBuilder(self._mesh, run, self._model.shardings, plan.scaler, draws, stacking, plan.guard, size)

    def _kept(
        self,
        step: CapturedStep,
        batch: PlacedBatch,
        key: Hashable | None,
        make: Callable[[], Callable[..., Any]],
        stacking: Stacking | None,
    ) -> Built:
        """The program that ``make`` makes, or that an earlier run has made; for ``key`` see :meth:`KeptGraph.program`."""
        if step.kept is None or key is None:
            return Built(make(), False, stacking)
        rows, split = batch.form.rows, batch.form.split
        key = (key, rows, split, step.scalars.is_empty, step.scalars.array_forms, tuple(step.scalars.outcomes))
        if may_be_stored(self._mesh):
            make = functools.partial(_stored, step.capture, key, make)
        return Built(*step.kept.program(key, make), stacking)

    def _check_stages(self, step: CapturedStep, stacking: Stacking | None) -> None:
        """See that the layers of a training step run on the stages of the mesh.

        Raises:
            ValueError: the mesh has stages, and they do not.
        """
        pipelining = self._model.pipelining
        if pipelining is None:
            return
        problem = step.capture.staged(pipelining).problem
        if not problem and stacking is None:
            problem = (
                "the update does not take the parameters of layers as one array: it needs an optimizer of torch.optim, automatic "
                "optimization, no hook that reads gradients, and layers of one param group"
            )
        if problem:
            raise ValueError(
                f"mesh axis 'stage' of size {pipelining.stages} splits repeated layers, but of the training step of "
                f"{type(self._model.module).__name__} none run on stages: {problem}. Change that, or give the devices of 'stage' "
                "to 'data' (over slices) or 'fsdp'"
            )

    def _stack(self, step: CapturedStep) -> Stacking | None:
        """Decide how the programs of a captured step want the parameters of repeated layers; None by name, as they are."""

        def allowed(names: Sequence[str]) -> bool:
            return self._model.may_stack(names) and self.plan.stackable(names, self._model.state.opt_state)

        pipelining, log = self._model.pipelining, self._log
        stacking = step.stacking(allowed, pipelining)
        staged = None if pipelining is None else step.capture.staged(pipelining)
        rolled = staged.schedule if staged else step.capture.rolled
        unrolled = (
            "" if stacking else ", left unrolled: the optimizer, or how they are sharded, does not take their parameters stacked"
        )
        log.loops += [f"{loop}{unrolled}" for loop in (staged.in_words() if staged and stacking else rolled.loops)]
        log.loops += [f"{refused}, left unrolled" for refused in rolled.refused]
        told = kernels_of(step.capture.graph.graph, self._mesh)
        log.attention += [kernel for kernel in told if kernel not in log.attention]
        log.losses += [loss for loss in losses_of(step.capture.graph.graph) if loss not in log.losses]
        return stacking


def _stored(capture: Capture, key: Hashable, make: Callable[[], Callable[..., Any]]) -> StoredProgram:
    """The program that ``make`` makes of a graph and ``key``, which may be on disk."""
    return StoredProgram(make(), lambda: f"{graph_digest(capture)}\n{told(key)}\n{told(settings())}")


def _check_trains_nothing(step: CapturedStep) -> None:
    """See that a step that is no training step leaves options of optimizers and schedulers alone.

    Raises:
        CaptureError: it changes them, which its runs do not repeat.
    """
    plan = step.optimizers.plan
    if plan.changes_options:
        raise CaptureError(
            f"outside of training_step, optimizers and schedulers are changed, which is not compiled: {plan.text()}.\n"
            "  Fix: do it in a hook."
        )
