"""The compiled executor: runs a module's steps as XLA programs over a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from torch_compat.step.buckets import cut
from torch_compat.step.capture.cached_program import CachedProgram
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.step_capture import StepBody, StepInputs, StepSpec, UserCall
from torch_compat.step.gradients import VisibleGradients
from torch_compat.step.host.assumptions import Assumptions, decide
from torch_compat.step.host.callback_queue import PendingCalls, StepCalls
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.index_looks import IndexLooks
from torch_compat.step.kept_steps import KeptSteps
from torch_compat.step.mesh_steps import EvaluationStep, MeshStep
from torch_compat.step.metrics import sync as metric_sync
from torch_compat.step.model_state import ModelState
from torch_compat.step.outcome import Filler, StepOutcome
from torch_compat.step.placed_batch import BatchForms, PlacedBatch
from torch_compat.step.planned import Planned
from torch_compat.step.program_builder import ProgramBuilder
from torch_compat.step.program_cache import CacheRun, Wanted
from torch_compat.step.step_services import StepServices, draws_by_torch
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_arrays import host_value
from xlatrain.bridge.errors import BridgeError, let_go
from xlatrain.mesh.data import BatchPlacer
from xlatrain.step.assumed import UNDECIDED, Guarded, before
from xlatrain.step.device_memory import Shortage
from xlatrain.step.stacking import Stacking
from xlatrain.step.step import add_gradients

_IN_FLIGHT = 8  # programs dispatched ahead of several devices: many sharded ones can deadlock XLA:CPU. One device: JAX's limit


class MeshStepRunner:
    """Runs the training and evaluation steps of one module on one mesh.

    Attributes:
        services: of the strategy.
        programs: makes the programs of its steps.
        planned: a look at the first program of training; None once it was taken, or where nobody wants it.
        fresh: the gradients that the last program gave, until :meth:`show_gradients`.
        finite: the finding of the plan's guard in the last update, on the devices; None without a guard.
        kept: what the next run of the module may take over.
        index_looks: the host's looks at whether indices in its steps were in range.
        ways_back: how often steps have come back to this way of running after eager ones.
        kept_rows: names of methods whose steps left, in this epoch, values of this process's rows on the host.
    """

    executor = "compiled"

    def __init__(self, model: ModelState, mesh: Mesh, services: StepServices) -> None:
        self.model = model
        self.mesh = mesh
        self.log = services.log
        self.copy_batches = False
        self.services = services
        self.planned = Planned.of_environment(mesh)
        self._by_torch = draws_by_torch(mesh) and self.planned is None
        self.finite: Any = None
        self.fresh: dict[str, Any] = {}
        self.kept_rows: set[str] = set()
        self.ways_back = 0
        self.index_looks = IndexLooks()
        run = CacheRun(model, services.roots, self.log, services.compiling, services.no_recompilation_after)
        if services.kept is None:
            self.kept = KeptSteps.begin(run, self._batch_forms())
        else:
            self.kept = services.kept
            self.kept.begin_run(run)
        self.programs = ProgramBuilder(model, mesh, self.log, self.kept.plans)
        self._forms, self._effects = self.kept.forms, self.kept.effects
        self._variants, self._carried = self.kept.programs, self.kept.carried
        self._running_step = ""
        self._taken_back: Exception | None = None
        self._not_taken_in = ""  # the last error of a write to a tensor without dims
        self._bounded = mesh.devices.size > 1
        self._in_flight: deque[Any] = deque()
        metric_sync.install()
        self._pending = PendingCalls(*([0] if self._forms.layout.processes > 1 else []))
        self._evaluations = 0

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
        self.ways_back = before.ways_back

    def took_back(self, error: Exception) -> bool:
        """Whether a step has ended with it just now of which nothing has happened: it may run once more, eagerly."""
        taken_back, self._taken_back = self._taken_back, None
        return taken_back is error

    def take_back(self, error: BaseException, host_values: HostValues, *, wholly: bool) -> None:
        """A step ended with ``error``, of whatever class, before its program gave anything: nothing of it is left.

        Args:
            error: which says whether the step may run eagerly, or is noted for :meth:`took_back`.
            host_values: of the step, whose draws are taken back.
            wholly: whether that was all; a program that has run before may have begun what cannot be taken back.
        """
        host_values.give_back()
        arrays = jax.tree.leaves(self.model.raw_state)  # shapes alone in a preflight, which has nothing to run eagerly
        wholly = wholly and all(isinstance(one, jax.Array) and not one.is_deleted() for one in arrays)
        if isinstance(error, BridgeError):
            error.recoverable = error.recoverable and wholly
        elif isinstance(error, Exception) and wholly and not _ends_the_run(error):
            self._taken_back = error

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

    # -- steps -----------------------------------------------------------------------------------------------------

    def run(self, step: MeshStep) -> StepOutcome:
        """Run a step of a batch: with the program for it and for the host as it is, which is captured if there is none yet.

        Raises:
            CaptureError: the step cannot be captured, or does something else from batch to batch; it did not run.
        """
        variants, host_values = self._variants, step.host_values
        if not self.model.offloads:  # whose state is in two memories
            host_values.assumptions = Assumptions()
        batch, self._running_step = step.batch, step.name
        undoable = True
        try:
            while True:
                step.batch = self._carried.beside(step.name, batch, self.model.live)
                try:
                    program = variants.program(
                        Wanted(step.name, step.static, step.batch, host_values, step.spec, step.build, may_pad=True)
                    )
                except BridgeError as error:
                    if self._carried.add(step.name, error.carried):
                        variants.carry(step.name, error.carried)
                    elif error.written and self._take_in(error):
                        variants.forget_programs()
                        self.programs.forget()
                    elif self._forms.layout.processes > 1 or not variants.attend(step.name, error):
                        raise  # what each process does on its host need not lead them all to one program
                    continue
                undoable = program.may_be_taken_back
                args = step.arguments(program)
                self._make_room(program)
                parted = self.model.part(program.step.assigned)
                if not program.step.scalars.assumed:
                    new, outputs = variants.run(program, *args)
                    break
                structure = jax.tree.structure(args[0])
                new, guarded = variants.run(program, *args)
                outputs = guarded.outputs
                if self._held(step, program, guarded):
                    break
                if step.replaces_state:
                    step.put_back(program, before(structure, new, guarded.left))
        except BaseException as error:
            step.undo()
            self.take_back(error, host_values, wholly=undoable)
            raise
        step.take(program, new, outputs)
        self._carried.have_run(step.name)
        self.model.put_assigned(parted, program.step.assigned)
        for redo in program.step.redo:
            redo()
        outcome = self._outcome(step.name, program, step.batch, _true_values(step, program, outputs), host_values)
        step.finish(program.step)
        return outcome

    def _take_in(self, error: BridgeError) -> bool:
        """Put a tensor of the host that a step writes to in place on the mesh; False where none can be there."""
        let_go(error)
        gc.collect()  # most of what the step's run made is gone
        there = [one for written in error.written if (one := written()) is not None]
        if any(self.model.take_in(one) for one in there if one.ndim > 0 or len(error.written) == 1):
            return True
        again, self._not_taken_in = str(error) == self._not_taken_in, str(error)
        if again:  # those without dims may be constants of the run itself, and each run has others
            return False
        taken = [self.model.take_in(one) for one in there if one.ndim == 0]
        return any(taken)

    def _held(self, step: MeshStep, program: CachedProgram, guarded: Guarded) -> bool:
        """Whether the outcomes of a step that ran were those for which its program was made; this waits for it.

        Where not, nothing of the step has happened, and what its program found is assumed from now on.
        """
        host_values, assumed = step.host_values, program.step.scalars.assumed
        assumptions = host_values.assumptions
        assert assumptions is not None
        found = host_value(guarded.found).tolist()
        wrong = [place for place, one in enumerate(assumed) if place >= assumptions.trusted and found[place] != one.outcome]
        if not wrong:
            self._variants.note_held(step.name, program)
            return True
        outcome = found[wrong[0]]
        if outcome == UNDECIDED:
            fill = Filler(program.step, _true_values(step, program, guarded.outputs), step.batch, self._forms.layout, host_values)
            outcome = decide(assumed[wrong[0]], program.step.calls, fill)
        self._variants.note_wrong(program)
        assumptions.known = [*(one.outcome for one in assumed[: wrong[0]]), outcome]
        assumptions.other = {}
        host_values.give_back()
        return False

    def evaluate(self, name: str, batch: PlacedBatch, static: Hashable, host_values: HostValues, call: UserCall) -> StepOutcome:
        """Run one validation, test or predict step, see :class:`~torch_compat.step.mesh_steps.EvaluationStep`."""
        return self.run(EvaluationStep(self, name, batch, static, host_values, call))

    def count_evaluation(self) -> int:
        """The number of the evaluation that begins."""
        self._evaluations += 1
        return self._evaluations

    def take_written(self, params: Any, buffers: Any, stacking: Stacking | None = None) -> None:
        """Take over the parameters and buffers that a program of an evaluation wrote, of which there are some."""
        state = self.model.stacked_state(stacking)
        new = dataclasses.replace(state, params={**state.params, **params}, buffers={**state.buffers, **buffers})
        self.model.advance(new, stacking)

    # -- gradients that hooks see ----------------------------------------------------------------------------------

    def show_gradients(self) -> None:
        """The backward pass of the last ``"split"`` program has happened: its gradients are added to what ``p.grad`` shows.

        A parameter that a hook has frozen since the forward pass gets none, as from torch's backward pass.

        Raises:
            MisconfigurationException: a hook has changed a parameter since then, which torch's backward pass would read.
        """
        model = self.model
        changed = next((name for name in model.live.written() if self.fresh.get(name) is not None), None)
        if changed is not None:
            raise MisconfigurationException(
                f"a hook before backward (on_before_zero_grad, on_before_backward) changed the parameter {changed!r}, but in a "
                "compiled step its gradients exist already. Change it after the update, in on_train_batch_end, or run eagerly "
                "(XLATRAIN_EXECUTOR=eager)"
            )
        model.gradients.push()
        carried, fresh = model.state.accumulated, model.of_trained(self.fresh)
        self.fresh = {}
        if carried:
            fresh = {**dict.fromkeys(fresh), **_added(carried, fresh)}
            model.state = dataclasses.replace(model.state, accumulated={})
        model.gradients.shown = VisibleGradients(fresh, model.state.params, model.strides)

    def apply(self, hyper: Any, static: Hashable) -> None:
        """Update the parameters with the gradients as the hooks left them; they can still be seen afterwards.

        Args:
            hyper, static: as a :class:`~torch_compat.step.mesh_steps.TrainingStep` gets them, read after the hooks.
        """
        assert self.model.gradients.shown is not None
        grads = self.model.gradients.shown.arrays()
        self.model.gradients.drop()  # the state is donated, and may hold the same arrays
        self.model.push_writes()
        state, extra = self.programs.update(static)(self.model.state, grads, hyper)
        self.finite = None if self.programs.plan.guard is None else extra[1]
        self.model.advance(state)
        self.model.gradients.shown = VisibleGradients(grads, state.params, self.model.strides)
        self.model.gradients.push()

    # -- what a step gave ------------------------------------------------------------------------------------------

    def _outcome(
        self, name: str, variant: CachedProgram, batch: PlacedBatch, outputs: Any, host_values: HostValues
    ) -> StepOutcome:
        packed, _ = outputs
        if self._bounded or variant.block is not None:
            self._in_flight.append(packed)
        step = variant.step
        self.index_looks.add(name, step, packed, host_values.numbers)
        for parameter, flag in step.requires_grad.items():
            self.model.params[parameter].requires_grad_(flag)
        for tensor, strides in step.strides.items():
            self.model.lay_out(tensor, strides)
        if not (
            step.calls or step.effects or step.written or step.batch_changes
        ):  # the many steps that leave nothing to do on the host

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
        for leaf, value in step.written.items():
            fill.write(leaf, value)
        for change in step.batch_changes:
            assert batch.values is not None
            change.make(batch.values.batch, functools.partial(self._kept, name, fill))
        if step.effects:
            if step.effects.hold_results:
                self._pending.make_all()
            step.effects.replay(self._effects.roots, functools.partial(self._kept, name, fill))
            for index in step.cached:  # the steps that follow have its values as constants
                fill.read(index)
            self._variants.note_replayed(variant)

        def make_result() -> Any:
            if step.calls:
                self._pending.make_all()
            return self._kept(name, fill, step.result.tree)

        result_of = functools.partial(self._pending.result, calls)
        return StepOutcome(step.logs, outputs[0], make_result, batch.logged, result_of)

    def _filler(self, step: CapturedStep, outputs: Any, batch: PlacedBatch, host_values: HostValues) -> Filler:
        return Filler(step, outputs, batch, self._forms.layout, host_values, self.index_looks.look, self.model.tensor)

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

    def _make_room(self, program: CachedProgram) -> None:
        """Before a run: wait for an older step where too many are in flight; several at a time, since each wait costs a few µs.

        One with a block of its own takes it over from the last.
        """
        if program.block is not None and self._in_flight:
            self._in_flight[-1].block_until_ready()
            self._in_flight.clear()
        elif len(self._in_flight) >= _IN_FLIGHT:
            for _ in range(_IN_FLIGHT // 2):
                oldest = self._in_flight.popleft()
            oldest.block_until_ready()

    def spec(self, body: StepBody, batch: PlacedBatch, call: UserCall, *, grad: bool = True, **options: Any) -> StepSpec:
        """A step of the module, with a body of :mod:`torch_compat.step.capture.user_steps`; for options see :meth:`_inputs`."""
        inputs = functools.partial(self._inputs, batch, call, **options)
        return StepSpec(self.model.module, self._effects, self.services.trace, body, inputs, grad)

    def _inputs(
        self, batch: PlacedBatch, call: UserCall, host_values: HostValues, *, with_gradients: bool = False, **options: Any
    ) -> StepInputs:
        """The inputs of a run at this moment.

        Args:
            with_gradients: the gradients that the parameters have are inputs too.
        """
        self._pending.make_all()  # the step's Python may look at what these change
        batch = self._carried.beside(self._running_step, batch, self.model.live)
        leaves = batch.form.leaves()
        if with_gradients:
            options["gradients"] = {name: self.model.params[name] for name in self.model.state.accumulated}
        options.update(graphs=self.services.graphs, shared=batch.form.shared, carried=batch.carried, by_torch=self._by_torch)
        params, buffers = self.model.params, self.model.buffers
        return StepInputs(params, buffers, leaves, batch.spec, call, host_values, self._variants.reading, **options)


def _true_values(step: MeshStep, program: CachedProgram, outputs: Any) -> Any:
    """The packed scalars and the values of a step, without what its batch was padded with."""
    packed, values = step.values(outputs)
    return packed, values if program.padding is None else cut(values, [spec.shape for spec in program.step.value_specs])


@jax.jit  # without compiler_options: sums alone
def _added(carried: dict[str, jax.Array], fresh: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    return add_gradients(carried, fresh)


def _ends_the_run(error: Exception) -> bool:
    """Whether an eager step is no answer: memory was short, or we raise the error on purpose (a recompilation that was forbidden,
    processes or a plan that do not fit). A misuse of ours that a user's step may catch is an error as any other."""
    ours = type(error).__module__.partition(".")[0] in ("torch_compat", "xlatrain")
    return (ours and not isinstance(error, MisconfigurationException)) or Shortage.from_error(error) is not None
