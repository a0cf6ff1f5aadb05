"""The dispatcher of a run's steps: compiled over the mesh, or eagerly where that is impossible."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch.utils.data import DataLoader

from torch_compat.plugins.loss_scaling import LossScaling
from torch_compat.run import hook_calls as call
from torch_compat.run.states import TrainerFn
from torch_compat.step import mesh_state
from torch_compat.step.eager.device import EagerDevice, eager_device
from torch_compat.step.eager.eager import EagerOptimization, EagerSteps
from torch_compat.step.eager.fallback import bring_home, executor_choice, must_fall_back, scripted_part, share_rows
from torch_compat.step.eager.in_place_lines import InPlaceLines, is_of_writes_in_place
from torch_compat.step.eager.whole_batch import WholeBatches
from torch_compat.step.effects.logged import LogRecorder
from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.kept_graphs import graphs_of
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimization.automatic import AutomaticOptimization, check_scaling
from torch_compat.step.optimization.compiled import compiled_optimization
from torch_compat.step.optimization.forward_only import ForwardOnly
from torch_compat.step.optimization.manual import ManualOptimization
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.live_state import LiveOptimizerStates
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.step.optimizers.state import read_exported
from torch_compat.step.optimizers.traced import TracedOptimizers
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.run_context import RunContext
from torch_compat.step.step_services import place_model, services_of
from torch_compat.step.update.own_backward import after_hooks, hook_before
from torch_compat.step.update.schedulers import configure_optimizers
from torch_compat.step.update.several_optimizers import check_several
from torch_compat.utilities.host_collectives import replicated_eager
from torch_compat.utilities.overrides import overrides
from torch_compat.utilities.rank_zero import WarningCache, rank_zero_info, rank_zero_warn
from torch_compat.utilities.single_process import in_less_time
from xlatrain.bridge.errors import BridgeError, CaptureError, user_line
from xlatrain.bridge.lazy_init import is_deferred
from xlatrain.cluster.distributed import world
from xlatrain.host.waiting import told
from xlatrain.mesh.batch_layout import BatchLayout
from xlatrain.mesh.lockstep import lockstep
from xlatrain.supported import COMPILED_TORCH

_once = WarningCache()
_SILENT_S = 20.0  # a bar on a terminal says at once that a step is compiled; a log hears of what takes longer than most


class StepDispatcher:
    """The dispatcher of one run's steps: compiled, or eagerly.

    Args:
        run: whose module, optimizers, precision and strategy are used.

    Attributes:
        steps: the runner of steps, from :meth:`start` on.
        optimization: the runner of training batches, from :meth:`setup_optimizers` on.
        functional: the pure form of the optimizer, or of all in manual optimization; None where steps run eagerly or nothing is
            optimized.
        loss_scaling: of ``precision="16-mixed"`` where steps run eagerly; compiled ones have it in their state.
        recorder, tracer: while a step is captured, where ``self.log`` goes and where the loop's counters come from.
    """

    model_state: type[ModelState] = ModelState
    compiled_steps: type[MeshStepRunner] = MeshStepRunner

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.steps: MeshStepRunner | EagerSteps | None = None
        self.optimization: AutomaticOptimization | ManualOptimization | EagerOptimization | None = None
        self.functional: FunctionalOptimizer | OptimizerSet | None = None
        self.live_states: LiveOptimizerStates | None = None
        self._compiled_optimizers: list[torch.optim.Optimizer] = []
        self._earlier_optimizers: list[torch.optim.Optimizer] = []
        self.loss_scaling: LossScaling | None = None
        self.recorder: LogRecorder | None = None
        self.tracer: ScalarTracer | None = None
        self._eager_device: EagerDevice | None = None
        self._contexts = contextlib.ExitStack()
        self._waiting = contextlib.ExitStack()  # while a program is made
        self._running = contextlib.ExitStack()  # of the compiled steps
        self._times_placed = 1
        self._traced_optimizers = TracedOptimizers([], [], {}, may_step=False)

    # -- the choice ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The context of a run: the strategy can place the model, make the optimizers, and reach their state."""
        run = self._run
        mesh_run = run.strategy._mesh_run
        self._earlier_optimizers = mesh_run.optimizers  # of a run before this one
        mesh_run.place_model, mesh_run.make_optimizers = self.start, self.setup_optimizers
        mesh_run.optimizer_state = functools.partial(mesh_state.optimizer_state, run)
        mesh_run.load_optimizer_states = functools.partial(mesh_state.load_optimizer_states, run)
        with self._contexts:
            yield

    def start(self) -> None:
        """Decide how steps run (``XLATRAIN_EXECUTOR``) and place the model; once in a run.

        Raises:
            MisconfigurationException: only compiled steps are wanted, and the module cannot be compiled.
        """
        if self.steps is not None:
            return
        call.old_hooks(self._run, "on_post_move_to_device")  # ties made here hold in the program and in checkpoints
        wanted = executor_choice()
        if wanted == "eager":
            self._start_eagerly("XLATRAIN_EXECUTOR=eager")
        elif (reason := self._uncompilable()) is not None:
            must_fall_back(wanted, reason, self._run.strategy.mesh)
            self._start_eagerly(reason)
        else:
            self._contexts.enter_context(self._running)
            self.steps = self._compiled_steps()
            self._running.enter_context(self.steps.running())

    def _start_eagerly(self, reason: str) -> None:
        """Run eagerly from the beginning, with the values that the module would have on the mesh."""
        module = self._run.lightning_module
        if world().process_count > 1 or any(is_deferred(t) for t in itertools.chain(module.parameters(), module.buffers())):
            self._place_model()  # process 0's values, or those that the constructor's tape gives
        bring_home(self._run.strategy.placed, self.release, reason)
        self._run_eagerly(reason)

    def _uncompilable(self) -> str | None:
        """Why this module's steps cannot be compiled whatever they do, or None."""
        run = self._run
        if run.state.fn == TrainerFn.FITTING and run._detect_anomaly and executor_choice() == "auto":
            return "detect_anomaly=True: operations are checked one by one, in plain torch"
        return scripted_part(run.lightning_module)

    def _place_model(self) -> ModelState:
        run = self._run
        return place_model(run.strategy, run.precision_plugin.convert_module(run.lightning_module), self.model_state)

    def _compiled_steps(self, before: MeshStepRunner | None = None) -> MeshStepRunner:
        """The steps of the module as it is now, which go on where the steps ``before`` ended."""
        if Version(torch.__version__).release < COMPILED_TORCH:
            _once.warn(
                f"compiled steps are tested with torch {'.'.join(map(str, COMPILED_TORCH))} and later; torch "
                f"{torch.__version__} is what strategy='torch_xla' needs, in an environment of its own"
            )
        strategy = self._run.strategy
        model = self._place_model()
        before_backward = hook_before(self._run)
        services = services_of(
            strategy,
            model,
            roots=self._effect_roots(),
            logging=self._capturing,
            forward=self._run.precision_plugin.forward_context,
            optimizers=lambda tracer, values: self._traced_optimizers.traced(tracer, values),
            compiling=self._tell_compiling,
            backward=self._captured_backward if self._backward_is_overridden() else None,
            around_backward=lambda: after_hooks(self._run, before_backward, self.recorder),
            graphs=graphs_of(model.module).begin_run(),
        )
        if before is None:
            return self.compiled_steps(model, strategy.mesh, services)
        steps = self.compiled_steps(model, strategy.mesh, replace(services, log=before.log))
        steps.go_on(before)
        return steps

    def _run_eagerly(self, reason: str) -> None:
        run = self._run
        if run.scaler is not None and self.loss_scaling is None:
            state = run.precision_plugin.begin_scaling()
            self.loss_scaling = LossScaling.of_state(run.scaler, state)
        if run._detect_anomaly:
            self._contexts.enter_context(torch.autograd.set_detect_anomaly(True))
        module = run.precision_plugin.convert_module(run.lightning_module)
        self.functional = None
        whole = None
        if world().process_count > 1:
            whole = WholeBatches(BatchLayout.from_mesh(run.strategy.mesh))
            self._contexts.enter_context(replicated_eager())
        self._eager_device = EagerDevice(module, run.precision_plugin, eager_device(run.strategy.mesh))
        run.strategy._mesh_run.device = self._eager_device.device
        self.steps = EagerSteps(run.precision_plugin, reason, whole, self._eager_device)

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
        assert isinstance(self.steps, MeshStepRunner)
        if world().process_count > 1:
            share_rows(self.steps.kept_rows, self._effect_roots(), run.state.stage, str(error))
        self._go_on_eagerly(str(error))

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
        if self._eager_device is not None:
            self._eager_device.release(self._run.optimizers)
            self._eager_device = None
        strategy = self._run.strategy
        with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
            if state := mesh_state.loss_scale_state(self._run):
                self._run.precision_plugin.end_scaling(state)
        on_host = self.live_states is not None and self.live_states.end(failed=failed)
        self.live_states = None
        if (model := strategy.placed) is not None:
            fits = model.fits_host(failed=failed)
            if fits and self.functional is not None and not on_host:
                with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
                    self.functional.write_states(model.state.opt_state)
                    model.drop_optimizer()
                    for optimizer in {id(one): one for one in (*self._compiled_optimizers, *self._run.optimizers)}.values():
                        read_exported(optimizer)
            if lost := model.release(to_host=fits, failed=failed):
                rank_zero_warn(
                    f"The step that failed took the values of {len(lost)} parameters and buffers with it ({lost[0]}, …): the "
                    "module has what the host read last of them. Load a checkpoint before you go on with it"
                )
            strategy.placed = None

    def random_state(self) -> dict[str, Any]:
        """Random streams of a run that is not on the mesh."""
        return {} if self._eager_device is None else self._eager_device.random_state()

    def load_random_state(self, state: Mapping[str, Any]) -> None:
        """Continues what :meth:`random_state` gave."""
        if self._eager_device is not None:
            self._eager_device.load_random_state(state)

    # -- what surrounds a capture ----------------------------------------------------------------------------------

    def _effect_roots(self) -> dict[str, Any]:
        run = self._run
        roots: dict[str, Any] = {"self": run.lightning_module}
        roots.update({f"trainer.callbacks[{i}]": callback for i, callback in enumerate(run.callbacks)})
        if run.datamodule is not None:
            roots["trainer.datamodule"] = run.datamodule
        roots.update(run.strategy.captured_owners())
        return roots

    @contextlib.contextmanager
    def _capturing(self, recorder: LogRecorder, tracer: ScalarTracer) -> Iterator[None]:
        """Record ``self.log``, and let counters be the tracer's, while a step is captured."""
        self.recorder, self.tracer = recorder, tracer
        try:
            yield
        finally:
            self.recorder = self.tracer = None

    def _backward_is_overridden(self) -> bool:
        run = self._run
        owners = (run.strategy.overrides("backward"), overrides(run.precision_plugin, "backward"))
        return any(owners) or call.has_own("backward", run.lightning_module)

    def _captured_backward(self, loss: torch.Tensor, differentiate: Callable[..., None]) -> None:
        """The strategy's or the module's own backward, while a step is captured; the hooks around it run on the host."""
        run = self._run
        mesh_run = run.strategy._mesh_run
        own = call.has_own("backward", run.lightning_module)
        mesh_run.backward = functools.partial(call.module_hook, run, "backward") if own else differentiate
        mesh_run.gradients_only = True
        try:
            run.strategy.backward(loss, run.optimizers[0] if run.optimizers else None)
        finally:
            mesh_run.backward, mesh_run.gradients_only = None, False

    def _tell_compiling(self, value: bool) -> None:
        account = self._run.run_time.account
        account.enter("compile") if value else account.exit()
        bar = self._run.progress_bar_callback
        if bar is not None:
            bar.show_compiling(value)
        self._waiting.close()
        if value:
            before = self.steps.log.seconds if self.steps is not None else 0.0
            what = "compiling a step" + (f" (those before took {before:,.0f} s)" if before else "")
            say = rank_zero_info if bar is None else bar.announce
            self._waiting.enter_context(told(what, say, _SILENT_S))

    # -- optimizers ------------------------------------------------------------------------------------------------

    def setup_optimizers(self) -> None:
        """Call ``configure_optimizers``, and compile the update where steps are compiled; once in a run.

        Raises:
            MisconfigurationException: several optimizers with automatic optimization, in a module that is none of 1.x.
        """
        if self.optimization is not None:
            return
        run = self._run
        if self._has_own_optimizers():
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
        self._make_optimization()

    def _make_optimization(self) -> None:
        run = self._run
        if isinstance(self.steps, MeshStepRunner):
            try:
                made = compiled_optimization(run, self.steps)
                self.optimization, self.functional, self._traced_optimizers = made.batches, made.functional, made.traced
                self._follow_optimizers(self.steps.model)
                return
            except UnsupportedOptimizerError as error:
                must_fall_back(executor_choice(), str(error), run.strategy.mesh)
                self.release()
                self._wrap_optimizers()
                self._run_eagerly(str(error))
        self._optimize_eagerly()

    def _has_own_optimizers(self) -> bool:
        """Whether a strategy's own set-up made the optimizers of this run."""
        own = self._run.strategy.optimizers
        return bool(own) and own is not self._earlier_optimizers

    def _follow_optimizers(self, model: ModelState) -> None:
        functional = self.functional
        if functional is None:
            return
        self._compiled_optimizers = list(self._run.optimizers)
        self.live_states = LiveOptimizerStates(
            self._compiled_optimizers,
            lambda: functional.write_states(model.state.opt_state),
            lambda: model.load_optimizer(functional.import_state),
        )

    def _keep_up(self) -> None:
        """Follow the module and the optimizers to parameters that came in, or were replaced, since the last step.

        What is on the mesh comes to the host and goes back as it is now: weights, gradients, the optimizers' state by parameter.

        Raises:
            CaptureError: an optimizer has a parameter that is not the module's, or this happens all the time.
        """
        steps, run = self.steps, self._run
        if not isinstance(steps, MeshStepRunner):
            return
        names = steps.model.other_parameters()
        if not names and (self.live_states is None or run.optimizers == self._compiled_optimizers):
            return
        own = set(run.lightning_module.parameters())
        stray = any(
            param not in own for optimizer in run.optimizers for group in optimizer.param_groups for param in group["params"]
        )
        if stray or self._times_placed > _TIMES_PLACED:
            steps.model.check_tensors()
            self._check_same_optimizers()
            return
        self._times_placed += 1
        self.look()
        steps.model.push_gradients()
        streams = mesh_state.random_state(run)
        self._running.close()
        bring_home(steps.model, self.release, f"self.{names[0]} is a new parameter" if names else "there are other optimizers")
        gradients = {param: param.grad for param in own if param.grad is not None}
        for param in gradients:
            param.grad = None
        self.steps = again = self._compiled_steps(steps)
        self._running.enter_context(again.running())
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
        assert isinstance(self.steps, EagerSteps) and self._eager_device is not None
        self._eager_device.take_optimizers(self._run.optimizers)
        self.optimization = EagerOptimization(self._run, self.steps, self._run.optimizers)

    # -- what the loops ask for ------------------------------------------------------------------------------------

    def epoch_begins(self, step: str) -> None:
        """Forget that the host keeps rows of the method ``step``: those of the last epoch have been dealt with."""
        if isinstance(self.steps, MeshStepRunner):
            self.steps.kept_rows.discard(step)

    def look(self) -> None:
        """Raise what a step until now found inside of its program (:mod:`torch_compat.step.index_looks`)."""
        if isinstance(self.steps, MeshStepRunner):
            self.steps.index_looks.look()

    def wait(self) -> None:
        """Wait until all steps that were begun have ended: a failure in the last of them is a failure of this run."""
        if isinstance(self.steps, MeshStepRunner):
            self.steps.wait()

    def batches(self, loader: Any, what: str, loaders: Sequence[Any] | None = None) -> Iterator[Any]:
        """The batches of ``loader``; on several processes all must have the same number.

        Args:
            loader: gives the batches.
            what: its name, for errors.
            loaders: those that ``loader`` joins; None: itself.
        """
        assert self.steps is not None
        self.steps.copy_batches = self._may_change_batches([loader] if loaders is None else loaders)
        if isinstance(self.steps, MeshStepRunner):
            self.steps.rescan()
        batches = lockstep(in_less_time(iter(loader)), what)
        return batches if world().process_count == 1 else self._loaded(batches)

    def _loaded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches`` of one of several processes; how they are loaded depends on how steps run, which may change."""
        own: Iterator[Any] | None = None
        while True:
            if own is None and isinstance(self.steps, EagerSteps):
                own = self.steps.loaded(batches)
            batch = next(batches if own is None else own, _END)
            if batch is _END:
                return
            yield batch

    def transferred(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch that hooks and the step get, after the transfer hooks.

        It is this process's rows, on the host; where steps run eagerly, all rows, on the device of the steps.
        """
        if not isinstance(self.steps, EagerSteps):
            return self._run.transfer(batch, dataloader_idx)
        return self.steps.put(self._run.transfer(self.steps.whole(batch), dataloader_idx))

    def _may_change_batches(self, loaders: Sequence[Any]) -> bool:
        """Whether a batch may be overwritten while its step still runs: by a loader that reuses memory, or by a user's hook."""
        if any(not isinstance(one, DataLoader) or one.batch_sampler is None for one in loaders):
            return True
        run = self._run
        own = [callback for callback in run.callbacks if not type(callback).__module__.startswith("torch_compat.")]
        hooks = [f"on_{stage}_batch_end" for stage in ("train", "validation", "test", "predict")]
        return any(call.has_own(hook, owner) for hook in hooks for owner in (run.lightning_module, *own))

    def counters(self, batch_idx: int) -> HostValues:
        """The loop's counters, as captured steps know them, and the numbers of optimizers and schedulers."""
        progress = self._run.fit_loop.progress
        counters = {"batch_idx": batch_idx, "current_epoch": progress.epoch, "global_step": progress.global_step}
        return HostValues(HostNumbers(counters, self._traced_optimizers.readers, self._run.loop_counters))

    def train(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """Run a training batch: gradients, and the update if ``stepped``.

        Raises:
            RuntimeError: the loss or a logged value is NaN, where ``detect_anomaly`` looks for it.
        """
        assert self.optimization is not None
        try:
            self._keep_up()
            self._check_optimizers()
            outcome = self.optimization.run(batch, batch_idx, stepped)
        except Exception as error:
            outcome = self.after_failure(error, lambda: self._batches().run(batch, batch_idx, stepped))
        if self._run._detect_anomaly and np.isnan(np.asarray(outcome.packed)).any():
            raise RuntimeError(
                f"detect_anomaly: the loss or a logged value of batch {batch_idx} of epoch {self._run.current_epoch} is NaN. "
                "To see which operation made it, run without XLATRAIN_EXECUTOR=compiled"
            )
        return outcome

    def after_failure(self, error: Exception, eagerly: Callable[[], StepOutcome]) -> StepOutcome:
        """The outcome of ``eagerly()``, where a compiled step failed since it cannot be compiled; steps are eager from then on.

        A fallback is a transaction: this is called where nothing of the step has happened but a capture, which is taken back.
        Code of the user's that ran before, such as hooks around the step, does not run again.

        Raises:
            Exception: ``error`` itself where it is another, or only compiled steps are wanted; what the step raises eagerly.
        """
        if not isinstance(self.steps, MeshStepRunner):
            raise error  # steps are eager already: they have raised it
        if not isinstance(error, BridgeError):
            return self._raise_with_effects(error, eagerly)
        self.fall_back(error)
        return eagerly()

    def _batches(self) -> AutomaticOptimization | ManualOptimization | EagerOptimization:
        assert self.optimization is not None
        return self.optimization

    def _check_optimizers(self) -> None:
        """Push to the mesh what hooks did to the optimizers since the last step.

        Raises:
            CaptureError: there are other optimizers now, which the compiled step does not have, or hooks before their steps.
        """
        if self.live_states is None:
            return
        assert self.functional is not None
        try:
            self.functional.check_hooks()
        except UnsupportedOptimizerError as error:
            raise CaptureError(str(error)) from error
        self._check_same_optimizers()
        self.live_states.push()

    def _check_same_optimizers(self) -> None:
        if self.live_states is not None and self._run.optimizers != self._compiled_optimizers:
            raise CaptureError(
                "trainer.optimizers was assigned other optimizers than configure_optimizers returned: a compiled step has those. "
                "Change the options and param groups of the old ones instead"
            )

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
            return self.after_failure(error, lambda: self._evaluate(name, batch, indices))

    def _raise_with_effects(self, error: Exception, eagerly: Callable[[], StepOutcome]) -> StepOutcome:
        """The user's step raised while it was captured: it runs eagerly once more, so that what it does before is kept.

        Raises:
            Exception: what it raises then; ``error`` itself where it has not been captured, or cannot run eagerly.
        """
        steps, model = self.steps, self._run.strategy.placed
        alone = world().process_count == 1 and executor_choice() == "auto" and (model is None or model.fits_host())
        if not isinstance(steps, MeshStepRunner) or not steps.raised(error) or not alone:
            raise error
        self._go_on_eagerly(_raised(error))
        try:
            # A mode of torch's is seen by tensor subclasses: only for the error that it explains.
            with (written := InPlaceLines()) if is_of_writes_in_place(error) else contextlib.nullcontext():
                outcome = eagerly()
        except Exception as again:
            if isinstance(error, type(again)) and _is_check_of_ours(error):
                raise error from None
            for note in getattr(error, "__notes__", ()) or (written.notes(again) if is_of_writes_in_place(error) else ()):
                again.add_note(note)
            _part(again, error)
            raise  # with the chain that the user's code gave it
        must_fall_back("auto", f"{type(error).__name__} was raised while the step was captured: {error}", self._run.strategy.mesh)
        return outcome

    def _evaluate(self, name: str, batch: Any, indices: tuple[int, ...]) -> StepOutcome:
        self._keep_up()
        run, steps = self._run, self.steps
        batch_idx, *rest = indices
        assert steps is not None
        placed = steps.place(batch)
        if (results := run.metric_log.results) is not None:
            results.batch_size = placed.logged
        with_grad = torch.is_grad_enabled()  # the loop has turned it off, but a hook may have turned it on again

        def user_step(*args: Any) -> Any:
            with torch.set_grad_enabled(with_grad):
                return call.step(run, name, *args)

        if isinstance(steps, EagerSteps):
            own_rows = name == "predict_step"  # what each process returns and writes; nothing goes on with it
            return steps.evaluate(placed, lambda real: user_step(real, *indices), own_rows=own_rows)  # pyright: ignore[reportArgumentType]

        def step(traced: Any, tracer: ScalarTracer) -> Any:
            return user_step(traced, tracer.counter("batch_idx"), *rest)

        return steps.evaluate(name, placed, (*rest, with_grad), self.counters(batch_idx), step)  # pyright: ignore[reportArgumentType]


_END = object()
_TIMES_PLACED = 8  # in one run


def _part(again: BaseException, error: Exception) -> None:
    """Take ``error`` out of what ``again``, which was raised while it was handled, came of."""
    one: BaseException | None = again
    while one is not None and one is not error:
        if one.__context__ is error:
            one.__context__ = None
        one = one.__context__


def _raised(error: Exception) -> str:
    """The exception of a capture as the reason of a fallback: its class, its first line, and the user's line."""
    text, where = str(error).strip().partition("\n")[0], user_line(traceback.extract_tb(error.__traceback__))
    return f"the step raises {type(error).__name__}{f': {text}' if text else ''}{f' ({where})' if where else ''}"


def _is_check_of_ours(error: Exception) -> bool:
    """Whether an error of a capture says more than what the op raises: torch's own, of fake tensors, says less."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)


_OURS = tuple(f"{Path(__file__).resolve().parents[2] / name}{os.sep}" for name in ("torch_compat", "xlatrain"))
