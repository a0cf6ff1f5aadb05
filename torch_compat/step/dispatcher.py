"""The dispatcher of a run's steps: compiled over the mesh, or eagerly where that is impossible."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_compat.plugins.loss_scaling import LossScaling
from torch_compat.run import hook_calls as call
from torch_compat.run.states import RunningStage, TrainerFn
from torch_compat.step import mesh_state
from torch_compat.step.batch_pass import may_change_batches, pass_over
from torch_compat.step.circumstances import Circumstances, may_be_kept
from torch_compat.step.compile_notice import CompileNotice
from torch_compat.step.eager.eager import EagerOptimization
from torch_compat.step.eager.eager_run import EagerRun
from torch_compat.step.eager.fallback import (
    bring_home,
    executor_choice,
    must_fall_back,
    share_rows,
    share_values,
    uninitialized,
    why_eager,
)
from torch_compat.step.eager.host_evaluation import HostEvaluation
from torch_compat.step.eager.once_more import once_more, raised
from torch_compat.step.effects.logged import LogRecorder
from torch_compat.step.guards.taking import given_again
from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.kept_graphs import graphs_of
from torch_compat.step.kept_steps import KeptSteps, steps_of
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimization.automatic import AutomaticOptimization, check_scaling
from torch_compat.step.optimization.compiled import compiled_optimization
from torch_compat.step.optimization.forward_only import ForwardOnly
from torch_compat.step.optimization.manual import ManualOptimization
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.placed_optimizers import PlacedOptimizers
from torch_compat.step.placed_run import PlacedRun, captured_by, roots_of, warn_of_torch
from torch_compat.step.run_context import RunContext
from torch_compat.step.step_runner import StepRunner
from torch_compat.step.update.own_backward import after_hooks, hook_before, own_backward
from torch_compat.step.update.schedulers import configure_optimizers
from torch_compat.step.update.several_optimizers import check_several
from torch_compat.step.way_back import OnceInitialized, WayBack, way_back
from torch_compat.utilities.single_process import in_less_time
from xlatrain.bridge.errors import BridgeError, let_go
from xlatrain.bridge.lazy_init import is_deferred
from xlatrain.cluster.distributed import world
from xlatrain.mesh.lockstep import lockstep


class StepDispatcher:
    """The dispatcher of one run's steps: compiled, or eagerly.

    Args:
        run: whose module, optimizers, precision and strategy are used.

    Attributes:
        is_set_up: whether what makes the optimizers of a run once has done so.
        steps: the runner of steps, from :meth:`start` on.
        optimization: the runner of training batches, from :meth:`setup_optimizers` on.
        recorder, tracer: while a step is captured, where ``self.log`` goes and where the loop's counters come from.
    """

    model_state: type[ModelState] = ModelState
    compiled_steps: type[MeshStepRunner] = MeshStepRunner

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.steps: StepRunner | None = None
        self.optimization: AutomaticOptimization | ManualOptimization | EagerOptimization | None = None
        self.recorder: LogRecorder | None = None
        self.tracer: ScalarTracer | None = None
        self._compiled: PlacedRun[MeshStepRunner] | None = None
        self._eager: EagerRun | None = None
        self._earlier_optimizers: list[torch.optim.Optimizer] = []
        self._contexts = contextlib.ExitStack()
        self._tell_compiling = CompileNotice(run, lambda: 0.0 if self.steps is None else self.steps.log.seconds)
        self._circumstances: Circumstances | None = None  # None: its steps end with this run
        self.is_set_up = False
        self._times_placed = 1
        self._beside: dict[str, torch.nn.Parameter] = {}  # what only the optimizers have
        self._on_host = HostEvaluation(run)
        self._way_back: WayBack | None = None  # from eager steps to compiled ones

    @property
    def placed_optimizers(self) -> PlacedOptimizers | None:
        """The optimizers on the mesh; None where steps run eagerly or nothing is optimized."""
        return None if self._compiled is None else self._compiled.optimizers

    @property
    def loss_scaling(self) -> LossScaling | None:
        """Loss scaling of ``precision="16-mixed"`` where steps run eagerly; compiled ones have it in their state."""
        return None if self._eager is None else self._eager.loss_scaling

    # -- the choice ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The context of a run: the strategy can place the model, make the optimizers, and reach their state."""
        mesh_run = self._run.strategy._mesh_run
        self._earlier_optimizers = mesh_run.optimizers  # of a run before this one
        mesh_run.executor = self
        with self._contexts:
            yield
        self._keep_steps()

    def start(self) -> None:
        """Decide how steps run (``XLATRAIN_EXECUTOR``) and place the model; once in a run.

        Raises:
            MisconfigurationException: only compiled steps are wanted, and the module cannot be compiled.
        """
        if self.steps is not None:
            return
        run = self._run
        call.old_hooks(run, "on_post_move_to_device")  # ties made here hold in the program and in checkpoints
        looks = run.state.fn == TrainerFn.FITTING and run._detect_anomaly
        reason = why_eager(run.lightning_module, run.strategy.mesh, detects_anomalies=looks)
        self._compile() if reason is None else self._start_eagerly(reason)

    def _start_eagerly(self, reason: str) -> None:
        """Run eagerly from the beginning, with the values that the module would have on the mesh."""
        run, module = self._run, self._run.lightning_module
        if world().process_count > 1 or any(is_deferred(t) for t in itertools.chain(module.parameters(), module.buffers())):
            share_values(run.strategy, run.precision_plugin.convert_module(module), reason, self.model_state)
        self._run_eagerly(reason)
        if uninitialized(module) is not None and run.scaler is None and self._eager is not None and self._eager.device.is_host:
            self._way_back = OnceInitialized(module, reason)

    def _compile(self, before: MeshStepRunner | None = None) -> None:
        """Compile the steps of the module as it is now, which go on where the steps ``before`` ended."""
        warn_of_torch()
        run = self._run
        module = run.precision_plugin.convert_module(run.lightning_module)
        kept = self._kept_steps() if before is None else None
        self._compiled = PlacedRun(
            run.strategy,
            module,
            self.compiled_steps,
            self.model_state,
            before,
            roots=roots_of(run),
            logging=functools.partial(captured_by, self),
            forward=run.precision_plugin.forward_context,
            compiling=self._tell_compiling,
            backward=own_backward(run),
            around_backward=functools.partial(after_hooks, run, hook_before(run)),
            graphs=graphs_of(module).begin_run(),
            kept=kept,
            beside=self._beside,
        )
        self.steps = self._compiled.steps
        self._contexts.enter_context(self._compiled.follow())

    def _kept_steps(self) -> KeptSteps | None:
        """The steps of the last run of the module, if nothing has changed since but what their guards see."""
        run = self._run
        last = steps_of(run.lightning_module).take()
        if self.compiled_steps is not MeshStepRunner or not may_be_kept(run):
            return None
        self._circumstances = Circumstances(run, roots_of(run))
        if last is None or not self._circumstances.same_as(last[0]):
            return None
        before, steps = last
        if not self._circumstances.of_same_objects(before):
            steps.programs.forget_trainer()
        return steps

    def _keep_steps(self) -> None:
        """Keep the steps of this run, which has ended well, for the next."""
        run, steps, before = self._run, self.steps, self._circumstances
        if before is None or not isinstance(steps, MeshStepRunner) or steps.log.fallback or steps.log.on_host:
            return
        if self._beside or steps.model.beside or not Circumstances(run, roots_of(run)).same_as(before):
            return
        if run.state.fn == TrainerFn.FITTING and not isinstance(self.optimization, AutomaticOptimization):
            steps.kept.programs.forget("training_step")  # which holds its optimizers
        if steps.kept.end_run(before.leaving):
            steps_of(run.lightning_module).keep(before, steps.kept, run.strategy._mesh_run)

    def _run_eagerly(self, reason: str) -> None:
        self._eager = EagerRun(self._run, reason, self._contexts)
        self.steps = self._eager.steps

    def fall_back(self, error: BridgeError) -> None:
        """Go on eagerly after a step could not be compiled; nothing of that step has run.

        Raises:
            BridgeError: ``error`` itself, where only compiled steps are wanted, or steps that ran may have been wrong.
            MisconfigurationException: there is too little memory; or the batches of the epoch that have run left values on the
                host, on each process those of its rows, which eager steps could not go on with.
        """
        run = self._run
        if executor_choice() == "compiled" or not error.recoverable:
            raise error
        must_fall_back("auto", str(error), run.strategy.mesh)
        let_go(error)
        if world().process_count > 1:
            share_rows(self._runner().kept_rows, roots_of(run), run.state.stage, str(error))
        steps, streams = self._runner(), mesh_state.random_state(run)
        self._go_on_eagerly(str(error))
        assert isinstance(steps, MeshStepRunner) and self._eager is not None
        if run.state.stage == RunningStage.TRAINING and run.scaler is None and self._eager.device.is_host:
            self._way_back = way_back(error, steps, streams)

    def _compile_again(self, way: WayBack) -> None:
        """Compile steps again, after the first ones could not be."""
        assert self._eager is not None
        count = self._eager.steps.log.steps
        self._eager.release()
        self._eager = self._way_back = None
        self._place_again(way.steps, way.streams)
        way.note(self._runner().log, count)

    def _go_on_eagerly(self, reason: str) -> None:
        run = self._run
        self.look()
        bring_home(run.strategy.placed, self.release, reason)
        self._run_eagerly(reason)
        if run.state.fn == TrainerFn.FITTING:
            self._wrap_optimizers()
            self._optimize_eagerly()

    def release(self, *, failed: bool = False) -> None:
        """Give the module ordinary host tensors again and the optimizer its state, and forget what is on the mesh.

        Args:
            failed: the run ended with an error, maybe inside of a step, whose donated arrays are gone.
        """
        run = self._run
        if self._eager is not None:
            self._eager.release()
        with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
            if state := mesh_state.loss_scale_state(run):
                run.precision_plugin.end_scaling(state)
        if (compiled := self._compiled) is not None:
            compiled.release(to_host=compiled.model.fits_host(failed=failed), failed=failed, others=run.optimizers)
            self._compiled = None

    def random_state(self) -> dict[str, Any]:
        """Random streams of a run that is not on the mesh."""
        return {} if self._eager is None else self._eager.device.random_state()

    def load_random_state(self, state: Mapping[str, Any]) -> None:
        """Continues what :meth:`random_state` gave."""
        if self._eager is not None:
            self._eager.device.load_random_state(state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``state_dict()`` of one optimizer of the run, with the state that is on the mesh."""
        optimizers = self.placed_optimizers
        return optimizer.state_dict() if optimizers is None else optimizers.state_dict(optimizer)

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizers the state of a checkpoint, on the mesh.

        Raises:
            MisconfigurationException: see :func:`~torch_compat.step.mesh_state.check_optimizers`.
        """
        mesh_state.check_optimizers(self._run.optimizers, states)
        given = zip(self._run.optimizers, states, strict=True)
        if (optimizers := self.placed_optimizers) is not None:
            optimizers.load(given)
            return
        for optimizer, state in given:
            optimizer.load_state_dict(dict(state))

    # -- optimizers ------------------------------------------------------------------------------------------------

    def setup_optimizers(self) -> None:
        """Call ``configure_optimizers``, and compile the update where steps are compiled: once, and when user code asks for it.

        Raises:
            MisconfigurationException: several optimizers with automatic optimization, in a module that is none of 1.x.
        """
        if self.optimization is not None and not self.is_set_up:
            return
        run = self._run
        made = run.strategy.optimizers and run.strategy.optimizers is not self._earlier_optimizers
        if made and not self.is_set_up:  # by a strategy's own set-up
            run.lr_scheduler_configs = [
                config for config in run.lr_scheduler_configs if getattr(config.scheduler, "optimizer", None) in run.optimizers
            ]
        else:
            run.optimizers, run.lr_scheduler_configs = configure_optimizers(run.lightning_module, run)
        if len(run.optimizers) > 1 and run.lightning_module.automatic_optimization:
            check_several(run)
        self._wrap_optimizers()
        if run.scaler is not None:
            check_scaling(run)
        if self.optimization is None or self._compiled is None:  # else they take their place before the next batch
            self._make_optimization()

    def _make_optimization(self) -> None:
        run = self._run
        if self._compiled is not None:
            try:
                self.optimization = compiled_optimization(run, self._compiled)
                return
            except UnsupportedOptimizerError as error:
                must_fall_back(executor_choice(), str(error), run.strategy.mesh)
                self.release()
                self._wrap_optimizers()
                self._run_eagerly(str(error))
        self._optimize_eagerly()

    def _keep_up(self) -> None:
        """Follow the module and the optimizers to parameters that came in, or were replaced, since the last step.

        A parameter that an optimizer has and the module has no more stays on the mesh beside the module, as nothing else does.

        Raises:
            CaptureError: this happens all the time.
        """
        run, compiled = self._run, self._compiled
        if compiled is None:
            return
        model, placed = compiled.model, compiled.optimizers
        names = model.other_parameters()
        if not names and (placed is None or run.optimizers == placed.optimizers):
            return
        if self._times_placed > _TIMES_PLACED:
            model.check_tensors()
            if placed is not None:
                placed.check_same(run.optimizers)
            return
        own = set(run.lightning_module.parameters())
        optimized = [param for optimizer in run.optimizers for group in optimizer.param_groups for param in group["params"]]
        strays = [param for param in optimized if param not in own]
        self._beside = {f"former parameter {number}": one for number, one in enumerate(dict.fromkeys(strays))}
        self._place_anew(f"self.{names[0]} is a new parameter" if names else "there are other optimizers")

    def _place_anew(self, reason: str) -> None:
        """Place the module, the parameters beside it, and the optimizers, as they are now.

        What is on the mesh comes to the host and goes back: weights, gradients, the optimizers' state by parameter.
        """
        run, compiled = self._run, self._compiled
        assert compiled is not None
        self._times_placed += 1
        self.look()
        compiled.model.gradients.push()
        streams = mesh_state.random_state(run)
        compiled.stop_following()
        bring_home(compiled.model, self.release, reason)
        self._place_again(compiled.steps, streams)

    def _place_again(self, before: MeshStepRunner | None, streams: dict[str, Any] | None) -> None:
        """Place what is on the host, whose steps go on where those of ``before`` ended, if there were some."""
        run = self._run
        params = (*run.lightning_module.parameters(), *self._beside.values())
        gradients = {param: param.grad for param in params if param.grad is not None}
        for param in gradients:
            param.grad = None
        self._compile(before)
        if streams is not None:
            mesh_state.load_random_state(run, streams)
        for param, grad in gradients.items():
            param.grad = grad  # a live parameter's: on the mesh
        if self.optimization is not None:
            self._wrap_optimizers()
            self._make_optimization()

    def _wrap_optimizers(self) -> None:
        run = self._run
        run.optimizers = run.optimizers  # new wrappers: those of the executor that was given up lead there

    def _optimize_eagerly(self) -> None:
        assert self._eager is not None
        self._eager.place_optimizers()
        self.optimization = EagerOptimization(self._run, self._eager.steps, self._run.optimizers)

    # -- what the loops ask for ------------------------------------------------------------------------------------

    def epoch_begins(self, step: str) -> None:
        """Forget that the host keeps rows of the method ``step``: those of the last epoch have been dealt with."""
        self._runner().kept_rows.discard(step)

    def look(self) -> None:
        """Raise what a step until now found inside of its program (:mod:`torch_compat.step.index_looks`)."""
        if self.steps is not None:
            self.steps.look()

    def wait(self) -> None:
        """Wait until all steps that were begun have ended: a failure in the last of them is a failure of this run."""
        self._runner().wait()

    def _runner(self) -> StepRunner:
        assert self.steps is not None
        return self.steps

    def batches(self, loader: Any, what: str, loaders: Sequence[Any] | None = None) -> Iterator[Any]:
        """The batches of ``loader``; on several processes all must have the same number.

        Args:
            loader: gives the batches.
            what: its name, for errors.
            loaders: those that ``loader`` joins; None: itself.
        """
        self._runner().copy_batches = may_change_batches(self._run, [loader] if loaders is None else loaders)
        return pass_over(lockstep(in_less_time(iter(loader)), what), self._runner)

    def transferred(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch that hooks and the step get, after the transfer hooks.

        It is this process's rows, on the host; where steps run eagerly, all rows, on the device of the steps.
        """
        return self._runner().transferred(self._run.transfer, batch, dataloader_idx)

    def counters(self, batch_idx: int) -> HostValues:
        """The loop's counters, as captured steps know them, and the numbers of optimizers and schedulers."""
        progress = self._run.fit_loop.progress
        readers = {} if self._compiled is None else self._compiled.traced.readers
        counters = {"batch_idx": batch_idx, "current_epoch": progress.epoch, "global_step": progress.global_step}
        return HostValues(HostNumbers(counters, readers, self._run.loop_counters))

    def train(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """Run a training batch: gradients, and the update if ``stepped``.

        Raises:
            RuntimeError: the loss or a logged value is NaN, where ``detect_anomaly`` looks for it.
        """
        assert self.optimization is not None
        try:
            self._keep_up()
            if (optimizers := self.placed_optimizers) is not None:
                optimizers.begin_step(self._run.optimizers)
            if (way := self._way_back) is not None and way.is_open:
                self._compile_again(way)
            with contextlib.nullcontext() if self._way_back is None else self._way_back.watching(stepped):
                outcome = self.optimization.run(batch, batch_idx, stepped)
        except Exception as error:
            outcome = self.after_failure(error, lambda: self._batches().run(batch, batch_idx, stepped))
        if self._run._detect_anomaly:
            outcome.refuse_nan(f"batch {batch_idx} of epoch {self._run.current_epoch}")
        return outcome

    def after_failure(self, error: Exception, eagerly: Callable[[], StepOutcome]) -> StepOutcome:
        """The outcome of ``eagerly()``, where a compiled step failed since it cannot be compiled; steps are eager from then on.

        A fallback is a transaction: this is called where nothing of the step has happened but a capture, which is taken back.
        Code of the user's that ran before, such as hooks around the step, does not run again.

        Raises:
            Exception: ``error`` itself where it is another, or only compiled steps are wanted; what the step raises eagerly.
        """
        if self._compiled is None:
            raise error  # steps are eager already: they have raised it
        if not isinstance(error, BridgeError):
            return self._raise_with_effects(error, eagerly)
        self.fall_back(error)
        with given_again():
            return eagerly()

    def _batches(self) -> AutomaticOptimization | ManualOptimization | EagerOptimization:
        assert self.optimization is not None
        return self.optimization

    def forward_only(self) -> ForwardOnly:
        """Let training batches learn nothing, until the pass is finished."""
        return ForwardOnly(self._run)

    def keep_gradients(self, keep: bool) -> None:
        """Whether gradients of the next steps outlive them, for :class:`ForwardOnly`. Eager steps leave them in ``p.grad``."""
        if isinstance(self.optimization, AutomaticOptimization):
            self.optimization.keeps_gradients = keep

    def forget_gradients(self) -> None:
        """The gradients that are left of earlier steps are None from here on."""
        if isinstance(self.optimization, AutomaticOptimization):
            self.optimization.kept_gradients = None
        else:
            self._run.lightning_module.zero_grad()

    def evaluate(self, name: str, batch: Any, indices: tuple[int, ...]) -> StepOutcome:
        """Run a validation, test or predict step: ``name`` is the method's, ``indices`` those of the batch and the loader."""
        try:
            return self._evaluate(name, batch, indices)
        except Exception as error:
            if not self._on_host.takes(name, error, self._runner().log):
                return self.after_failure(error, lambda: self._evaluate(name, batch, indices))
        with given_again():
            return self._evaluate(name, batch, indices)

    def _raise_with_effects(self, error: Exception, eagerly: Callable[[], StepOutcome]) -> StepOutcome:
        """A step of which nothing is left ended with an error: it runs eagerly once more, so that what it does before is kept.

        Raises:
            Exception: what it raises then; ``error`` itself where more than an attempt has failed, or it cannot run eagerly.
        """
        compiled = self._compiled
        alone = world().process_count == 1 and executor_choice() == "auto"
        if compiled is None or not compiled.steps.took_back(error) or not alone or not compiled.model.fits_host():
            raise error
        self._go_on_eagerly(raised(error))
        with given_again():
            outcome = once_more(error, eagerly)
        must_fall_back("auto", f"{type(error).__name__} was raised before the step could run: {error}", self._run.strategy.mesh)
        return outcome

    def _evaluate(self, name: str, batch: Any, indices: tuple[int, ...]) -> StepOutcome:
        self._keep_up()
        run, batch_idx, *rest = self._run, *indices
        steps = self._runner() if self._compiled is None else self._on_host.steps.get(name, self._runner())
        placed = steps.place(batch)
        if (results := run.metric_log.results) is not None:
            results.batch_size = placed.logged
        with_grad = torch.is_grad_enabled()  # the loop has turned it off, but a hook may have turned it on again

        def step(given: Any, tracer: ScalarTracer | None) -> Any:
            counted = batch_idx if tracer is None else tracer.counter("batch_idx")
            with torch.set_grad_enabled(with_grad):
                return call.step(run, name, given, counted, *rest)

        return steps.evaluate(name, placed, (*rest, with_grad), self.counters(batch_idx), step)


_TIMES_PLACED = 8  # in one run
