"""The compiled executor: runs a module's steps as XLA programs over a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from torch_compat.step.capture.cached_program import NO_FACTS, Built, CachedProgram, NamedStatic
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.step_capture import StepBody, StepInputs, StepSpec, UserCall
from torch_compat.step.capture.user_steps import evaluation_body, training_body, updating_body
from torch_compat.step.effects.recorder import EffectRecorder
from torch_compat.step.gradients import VisibleGradients
from torch_compat.step.host.assumptions import Assumptions, decide
from torch_compat.step.host.callback_queue import PendingCalls, StepCalls
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.index_looks import IndexLooks
from torch_compat.step.metrics import sync as metric_sync
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimizers.host_part import HostPart
from torch_compat.step.outcome import Filler, StepOutcome
from torch_compat.step.placed_batch import BatchForms, PlacedBatch
from torch_compat.step.planned import Planned
from torch_compat.step.program_cache import ProgramCache
from torch_compat.step.programs import (
    UpdatingPrograms,
    evaluation_program,
    in_matmul_precision,
    training_program,
    updating_program,
)
from torch_compat.step.step_services import StepServices
from torch_compat.step.update.plan import UpdatePlan, update
from torch_compat.step.values.user_objects import containers_around
from torch_compat.utilities.host_arrays import host_value
from xlatrain.bridge.capture.vocabulary import losses_of
from xlatrain.bridge.errors import BridgeError
from xlatrain.bridge.lower.kernels.chosen import kernels_of
from xlatrain.mesh.data import BatchPlacer
from xlatrain.step.assumed import UNDECIDED, Guarded, before
from xlatrain.step.loss_scale import LossScaler
from xlatrain.step.stacking import Stacking
from xlatrain.step.step import StepBuilder, add_gradients, no_update

_IN_FLIGHT = 8  # programs dispatched ahead of several devices: many sharded ones can deadlock XLA:CPU. One device: JAX's limit


class MeshStepRunner:
    """Runs the training and evaluation steps of one module on one mesh.

    Attributes:
        finite: the finding of the plan's guard in the last update, on the devices; None without a guard.
        index_looks: the host's looks at whether indices in its steps were in range.
        kept_rows: names of methods whose steps left, in this epoch, values of this process's rows on the host.
    """

    executor = "compiled"

    def __init__(self, model: ModelState, mesh: Mesh, services: StepServices) -> None:
        self.model = model
        self.mesh = mesh
        self.log = services.log
        self.copy_batches = False
        self._forms = self._batch_forms()
        self._services = services
        self._effects = EffectRecorder({**services.roots, **containers_around(services.roots.values())})
        self._variants = ProgramCache(
            model, services.roots, self._effects.roots, self.log, services.compiling, services.no_recompilation_after
        )
        self._bounded = mesh.devices.size > 1
        self._in_flight: deque[Any] = deque()
        metric_sync.install()
        self._pending = PendingCalls(*([0] if self._forms.layout.processes > 1 else []))
        self._planned = Planned.of_environment(mesh)
        self._plan = UpdatePlan(None)
        self.finite: Any = None
        self._updates: dict[Hashable, Callable[..., Any]] = {}  # by what else than arrays an update depends on
        self._fresh: dict[str, Any] = {}
        self._evaluations = 0
        self.kept_rows: set[str] = set()
        self._updating = UpdatingPrograms()
        self.index_looks = IndexLooks()

    def _batch_forms(self) -> BatchForms:
        return BatchForms(BatchPlacer(self.mesh))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The context of a whole run: what the host assigns to modules is followed; at its end no host call waits."""
        with self._variants.following(), self._pending.running():
            yield

    def go_on(self, before: MeshStepRunner) -> None:
        """Go on where the steps ``before`` ended."""
        self.copy_batches, self.kept_rows, self._evaluations = before.copy_batches, before.kept_rows, before._evaluations

    def set_plan(self, plan: UpdatePlan) -> None:
        """Give the training programs that are made from now on their update, loss scaling and check of gradients."""
        self._plan = plan
        self._updates.clear()

    def raised(self, error: Exception) -> bool:
        """Whether the user's own step raised it while it was captured, so that nothing of the step has happened."""
        return self._variants.raised(error)

    def rescan(self) -> None:
        """A pass over batches begins: find what hooks changed where it cannot be followed."""
        self._variants.rescan()

    def loaded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``; a pass over them begins."""
        self.rescan()
        return batches

    def transferred(self, transfer: Callable[[Any, int], Any], batch: Any, dataloader_idx: int) -> Any:
        """This process's rows of a batch, on the host, after the transfer hooks."""
        return transfer(batch, dataloader_idx)

    def place(self, batch: Any) -> PlacedBatch:
        """Put this process's rows of a batch on the mesh.

        Raises:
            OverflowError: an int64 value that does not fit int32, named by the leaf.
        """
        return self._forms.place(batch, self.copy_batches)

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self,
        batch: PlacedBatch,
        mode: str,
        accumulate: int,
        hyper: Any,
        static: Hashable,
        host_values: HostValues,
        call: UserCall,
    ) -> StepOutcome:
        """Run one training step.

        Args:
            mode: ``"fused"`` (gradients and update), ``"accumulate"`` (gradients are added up), or ``"split"`` (gradients
                leave the program: :meth:`show_gradients` lets hooks see them, :meth:`apply` takes the step).
            accumulate: what the loss is divided by.
            hyper: the optimizer's numeric options, an input of the program.
            static: what else decides about the program (optimizer flags).
            host_values: the loop's counters.
            call: ``(batch, tracer) -> result``, the user's ``training_step``.
        """

        def build(step: CapturedStep) -> Built:
            stacking = None if mode == "split" else self._stack(step)
            builder = self._builder(step.capture.uses_random, stacking)
            key = None if (plan := self._plan.key) is None else ("train", mode, accumulate, plan, builder.key)
            return Built(*self._program(step, batch, key, lambda: training_program(step, batch, mode, builder)), stacking)

        services = self._services
        options = {"scaler": self._plan.scaler, "backward": services.backward, "around_backward": services.around_backward}
        spec, key = self._spec(training_body(accumulate), batch, call, **options), (mode, accumulate, static)
        self._may_assume(host_values)
        while True:
            variant = self._variants.lookup_or_capture("training_step", key, batch, host_values, spec, build)
            stacking = variant.stacking
            state = self.model.stacked_state(stacking)
            carried = state.accumulated
            if mode == "split" and carried:
                state = dataclasses.replace(state, accumulated={})
            extra = (hyper,) if mode == "fused" else ()
            args = (state, batch.arrays, variant.step.scalars.inputs(host_values), *extra)
            if self._planned is not None and mode != "accumulate":
                variant.program, self._planned = self._planned.compile(variant.program, args, batch.size, accumulate), None
            structure = jax.tree.structure(state) if variant.step.scalars.assumed else None
            new, out = self._variants.run(variant, *args)
            if not variant.step.scalars.assumed:
                break
            outputs = out.outputs[0] if mode == "fused" else out.outputs[1] if mode == "split" else out.outputs
            if self._held("training_step", variant, batch, out, outputs, host_values):
                out = out.outputs
                break
            old = before(structure, new, out.left)
            self.model.put_back(dataclasses.replace(old, accumulated=carried) if mode == "split" else old, stacking)
        outputs = out
        if mode == "fused":
            outputs, extra = out
            self.finite = None if self._plan.guard is None else extra[1]
            self.model.differentiated = variant.step.differentiated
        elif mode == "split":
            self._fresh, outputs = out
            new = dataclasses.replace(new, accumulated=carried)
        self.model.advance(new, stacking, variant.step.changed)
        self.log.steps += 1
        return self._outcome("training_step", variant, batch, outputs, host_values)

    def train_manually(
        self,
        batch: PlacedBatch,
        host: HostPart,
        host_values: HostValues,
        call: UserCall,
        name: str = "training_step",
        facts: NamedStatic = NO_FACTS,
        scaler: LossScaler | None = None,
    ) -> tuple[StepOutcome, CapturedStep]:
        """Run one training step that runs backward and its optimizers itself.

        Args:
            host: does what steps do on the host; the state of its optimizers is ``model.state.opt_state``.
            host_values: the host's values.
            call: ``(batch, tracer) -> result``, the user's ``training_step`` with the hooks in it.
            name: of the step.
            facts: what else decides about the program.
            scaler: loss scaling of the step's backward passes and optimizer steps, or None.
        """
        model, optimizers = self.model, host.optimizers
        model.push_writes()

        def build(step: CapturedStep) -> Built:
            size = model.gradient_bytes()
            builder = StepBuilder(self.mesh, no_update, model.shardings, draws=step.capture.uses_random, gradient_bytes=size)
            step_optimizer = optimizers.update_from_host if model.offloads else optimizers.update
            others = (batch.key(), optimizers.static_key(), facts, model.requires_grad(), torch.get_float32_matmul_precision())
            return Built(self._updating.of(step, others, lambda: updating_program(step, batch, step_optimizer, builder)))

        static = facts.joined(("manual", tuple(model.state.accumulated), optimizers.static_key()))
        spec = self._spec(updating_body, batch, call, with_gradients=True, scaler=scaler)
        self._may_assume(host_values)
        host.begin()
        try:
            while True:
                variant = self._variants.lookup_or_capture(name, static, batch, host_values, spec, build)
                step, assumed = variant.step, bool(variant.step.scalars.assumed)
                hypers = host.run(step.optimizers.plan, host_values, undoable=variant.runs == 0 or assumed)
                scalars = step.scalars.inputs(host_values)
                if model.state.accumulated and not step.reads_gradients and not assumed:
                    model.drop_gradients()
                structure = jax.tree.structure(model.state) if assumed else None
                new, outputs = self._variants.run(variant, model.state, batch.arrays, scalars, hypers)
                if not assumed:
                    break
                guarded, outputs = outputs, outputs.outputs
                if self._held(name, variant, batch, guarded, outputs, host_values):
                    break
                host.undo()
                model.put_back(before(structure, new, guarded.left))
        except BridgeError:
            host.undo()  # the step did not run
            raise
        model.advance(new, changed=step.changed)
        self.log.steps += 1
        outcome = self._outcome(name, variant, batch, outputs, host_values)
        for called in step.optimizers.calls:
            optimizers.optimizers[called.index].run_post_hooks()
        return outcome, step

    def show_gradients(self) -> None:
        """The backward pass of the last ``"split"`` program has happened: its gradients are added to what ``p.grad`` shows.

        A parameter that a hook has frozen since the forward pass gets none, as from torch's backward pass.
        """
        model = self.model
        model.push_gradients()
        carried, fresh = model.state.accumulated, model.of_trained(self._fresh)
        self._fresh = {}
        if carried:
            fresh = {**dict.fromkeys(fresh), **_added(carried, fresh)}
            model.state = dataclasses.replace(model.state, accumulated={})
        model.grads = VisibleGradients(fresh, model.state.params)

    def apply(self, hyper: Any, static: Hashable) -> None:
        """Update the parameters with the gradients as the hooks left them; they can still be seen afterwards.

        Args:
            hyper, static: as :meth:`train` gets them, read after the hooks.
        """
        assert self.model.grads is not None
        grads = self.model.grads.arrays()
        self.model.drop_gradients()  # the state is donated, and may hold the same arrays
        self.model.push_writes()
        if static not in self._updates:
            self._updates[static] = self._builder().apply()
        state, extra = self._updates[static](self.model.state, grads, hyper)
        self.finite = None if self._plan.guard is None else extra[1]
        self.model.advance(state)
        self.model.grads = VisibleGradients(grads, state.params)
        self.model.push_gradients()

    def _builder(self, draws: bool = True, stacking: Stacking | None = None) -> StepBuilder:
        plan = self._plan
        run = in_matmul_precision(functools.partial(update, plan.frozen()))
        size = self.model.gradient_bytes()
        return StepBuilder(self.mesh, run, self.model.shardings, plan.scaler, draws, stacking, plan.guard, size)

    def _program(
        self, step: CapturedStep, batch: PlacedBatch, key: Hashable | None, make: Callable[[], Callable[..., Any]]
    ) -> tuple[Callable[..., Any], bool]:
        """The program of a captured step, and whether an earlier run has made it; for ``key`` see :meth:`KeptGraph.program`."""
        if step.kept is None or key is None:
            return make(), False
        rows, split = batch.form.rows, batch.form.split
        return step.kept.program((key, rows, split, step.scalars.is_empty, tuple(step.scalars.outcomes)), make)

    def _stack(self, step: CapturedStep) -> Stacking | None:
        """Decide how the programs of a captured step want the parameters of repeated layers; None by name, as they are."""

        def allowed(names: Sequence[str]) -> bool:
            return self.model.may_stack(names) and self._plan.stackable(names, self.model.state.opt_state)

        stacking = step.stacking(allowed)
        rolled = step.capture.rolled
        unrolled = (
            "" if stacking else ", left unrolled: the optimizer, or how they are sharded, does not take their parameters stacked"
        )
        self.log.loops += [f"{loop}{unrolled}" for loop in rolled.loops]
        self.log.loops += [f"{refused}, left unrolled" for refused in rolled.refused]
        told = kernels_of(step.capture.graph.graph, self.mesh)
        self.log.attention += [kernel for kernel in told if kernel not in self.log.attention]
        self.log.losses += [loss for loss in losses_of(step.capture.graph.graph) if loss not in self.log.losses]
        return stacking

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, name: str, batch: PlacedBatch, static: Hashable, host_values: HostValues, call: UserCall) -> StepOutcome:
        """Run one validation, test or predict step.

        Args:
            name: of the method.
            static: what else decides about the program (the index of the dataloader).
            host_values: the loop's counters.
            call: ``(batch, tracer) -> result``, the user's method.
        """

        def build(step: CapturedStep) -> Built:
            shardings, stacking = self.model.param_shardings, self._stack(step)
            key = ("evaluate", self.mesh, tuple(sorted(shardings.items())), stacking)
            make = functools.partial(evaluation_program, step, batch, self.mesh, shardings, stacked=stacking is not None)
            return Built(*self._program(step, batch, key, make), stacking)

        spec = self._spec(evaluation_body, batch, call, grad=False)
        self._evaluations += 1
        draws = np.int32(-self._evaluations)
        self._may_assume(host_values)
        while True:
            variant = self._variants.lookup_or_capture(name, static, batch, host_values, spec, build)
            stacking = variant.stacking
            state, scalars = self.model.stacked_state(stacking), variant.step.scalars.inputs(host_values)
            written, outputs = self._variants.run(variant, state.params, state.buffers, state.key, draws, batch.arrays, scalars)
            if not variant.step.scalars.assumed:
                break
            guarded, outputs = outputs, outputs.outputs
            if self._held(name, variant, batch, guarded, outputs, host_values):
                break
        if any(written):
            params, buffers = written
            self.model.advance(
                dataclasses.replace(state, params={**state.params, **params}, buffers={**state.buffers, **buffers}), stacking
            )
        return self._outcome(name, variant, batch, outputs, host_values)

    # -- assumed outcomes ------------------------------------------------------------------------------------------

    def _may_assume(self, host_values: HostValues) -> None:
        """A step begins, which may be captured for outcomes that only it knows."""
        if not self.model.offloads:  # its state is in two memories
            host_values.assumptions = Assumptions()

    def _held(
        self, name: str, variant: CachedProgram, batch: PlacedBatch, guarded: Guarded, outputs: Any, host_values: HostValues
    ) -> bool:
        """Whether the outcomes of a step that ran were those for which its program was made; this waits for it.

        Where not, nothing of the step has happened, and what its program found is assumed from now on.
        """
        assumptions, assumed = host_values.assumptions, variant.step.scalars.assumed
        assert assumptions is not None
        found = host_value(guarded.found).tolist()
        wrong = [place for place, one in enumerate(assumed) if place >= assumptions.trusted and found[place] != one.outcome]
        if not wrong:
            self._variants.note_held(name, variant)
            return True
        outcome = found[wrong[0]]
        if outcome == UNDECIDED:
            fill = Filler(variant.step, outputs, batch, self._forms.layout, host_values)
            outcome = decide(assumed[wrong[0]], variant.step.calls, fill)
        self._variants.note_wrong(variant)
        assumptions.known = [*(one.outcome for one in assumed[: wrong[0]]), outcome]
        assumptions.other = {}
        if assumptions.take_back is not None:
            assumptions.take_back()
        return False

    # -- what a step gave ------------------------------------------------------------------------------------------

    def _outcome(
        self, name: str, variant: CachedProgram, batch: PlacedBatch, outputs: Any, host_values: HostValues
    ) -> StepOutcome:
        packed, _ = outputs
        if self._bounded:
            self._bound(packed)
        step = variant.step
        self.index_looks.add(name, step, packed, host_values.numbers)
        for parameter, flag in step.requires_grad.items():
            self.model.params[parameter].requires_grad_(flag)
        if not step.calls and not step.effects:  # the many steps that leave nothing to do on the host

            def result() -> Any:
                return self._kept(name, self._filler(step, outputs, batch, host_values), step.result.tree)

            return StepOutcome(step.logs, packed, result, batch.logged)
        return self._outcome_on_host(name, variant, batch, outputs, host_values)

    def _outcome_on_host(
        self, name: str, variant: CachedProgram, batch: PlacedBatch, outputs: Any, host_values: HostValues
    ) -> StepOutcome:
        """The outcome of a step with host calls or side effects, which are made, or made later, with its real values."""
        step = variant.step
        fill = self._filler(step, outputs, batch, host_values)
        calls = StepCalls(step.calls, fill)
        fill.results = calls.results
        self._pending.add(calls)
        if step.effects:
            if step.effects.hold_results:
                self._pending.make_all()
            step.effects.replay(self._effects.roots, functools.partial(self._kept, name, fill))
            self._variants.note_replayed(variant)

        def make_result() -> Any:
            if step.calls:
                self._pending.make_all()
            return self._kept(name, fill, step.result.tree)

        result_of = functools.partial(self._pending.result, calls)
        return StepOutcome(step.logs, outputs[0], make_result, batch.logged, result_of)

    def _filler(self, step: CapturedStep, outputs: Any, batch: PlacedBatch, host_values: HostValues) -> Filler:
        return Filler(step, outputs, batch, self._forms.layout, host_values, self.index_looks.look)

    def _kept(self, name: str, fill: Filler, tree: Any) -> Any:
        """A recorded value with real values filled in, which the host keeps."""
        fill.gave_rows = False
        filled = fill(tree)
        if fill.gave_rows:
            self.kept_rows.add(name)
        return filled

    def look(self) -> None:
        """Raise what a step until now found inside of its program.

        Raises:
            IndexError: see :meth:`~torch_compat.step.index_looks.IndexLooks.look`.
        """
        self.index_looks.look()

    def wait(self) -> None:
        """Until no step is in flight.

        Raises:
            IndexError: see :meth:`~torch_compat.step.index_looks.IndexLooks.look`.
        """
        jax.block_until_ready(self.model.raw_state)
        self._in_flight.clear()
        self.index_looks.look()

    def _bound(self, packed: Any) -> None:
        """Wait for an older step where too many are in flight; several at a time, since each wait costs a few µs."""
        self._in_flight.append(packed)
        if len(self._in_flight) > _IN_FLIGHT:
            for _ in range(_IN_FLIGHT // 2):
                oldest = self._in_flight.popleft()
            oldest.block_until_ready()

    def _spec(self, body: StepBody, batch: PlacedBatch, call: UserCall, *, grad: bool = True, **options: Any) -> StepSpec:
        """A step of the module, with a body of :mod:`torch_compat.step.capture.user_steps`; for options see :meth:`_inputs`."""
        inputs = functools.partial(self._inputs, batch, call, **options)
        return StepSpec(self.model.module, self._effects, self._services.trace, body, inputs, grad)

    def _inputs(
        self, batch: PlacedBatch, call: UserCall, host_values: HostValues, *, with_gradients: bool = False, **options: Any
    ) -> StepInputs:
        """The inputs of a run at this moment.

        Args:
            with_gradients: the gradients that the parameters have are inputs too.
        """
        self._pending.make_all()  # the step's Python may look at what these change
        leaves = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in batch.form.shapes]
        if with_gradients:
            options["gradients"] = {name: self.model.params[name] for name in self.model.state.accumulated}
        options["graphs"] = self._services.graphs
        params, buffers = self.model.params, self.model.buffers
        return StepInputs(params, buffers, leaves, batch.spec, call, host_values, self._variants.reading, **options)


@jax.jit  # without compiler_options: sums alone
def _added(carried: dict[str, jax.Array], fresh: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    return add_gradients(carried, fresh)
