"""Automatic optimization: one program per batch, or two where somebody wants to see the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_compat.callbacks.non_finite_guard import guard_of
from torch_compat.run import hook_calls as call
from torch_compat.step.eager.eager import EagerOptimization
from torch_compat.step.gradients import VisibleGradients, of_captured_graph
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.mesh_steps import TrainingStep
from torch_compat.step.optimization.planned_update import PlannedUpdate
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.placed_batch import PlacedBatch
from torch_compat.step.run_context import RunContext
from torch_compat.step.update.gradient_readers import reads_gradients_between_steps
from torch_compat.step.update.plan import UpdatePlan
from torch_compat.step.update.strategy_hooks import StrategyHooks
from torch_compat.utilities.exceptions import MisconfigurationException

GRADIENT_HOOKS = (
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
"""Hooks between the forward pass and the update. Where one is overridden the program is cut after the gradients."""


def gradient_hooks(run: RunContext) -> set[str]:
    """The hooks between the forward pass and the update that the module or a callback overrides."""
    owners = (run.lightning_module, *run.callbacks)
    found = {name for name in GRADIENT_HOOKS if any(call.has_own(name, owner) for owner in owners)}
    if run.gradient_clip_val and call.has_own("clip_gradients", run.lightning_module):
        found.add("configure_gradient_clipping")  # this hook calls it
    return found


def check_scaling(run: RunContext) -> None:
    """Whether the plugins of a run with ``precision="16-mixed"`` leave loss scaling to the run.

    Raises:
        MisconfigurationException: one of them has its own members between the forward pass and the update.
    """
    if StrategyHooks(run).on_gradients:
        raise MisconfigurationException(
            f"precision='16-mixed' scales the loss, and members of {type(run.strategy).__name__} or "
            f"{type(run.precision_plugin).__name__} around backward, clipping or optimizer steps would see scaled gradients; "
            "use precision='bf16-mixed', which needs no scaling, or hooks of the module and of callbacks"
        )


class AutomaticOptimization:
    """Runs ``training_step``, backward, clipping and the optimizer for each batch.

    Args:
        run: the run.
        steps: the compiled executor.
        optimizer: what ``configure_optimizers`` returned; None trains nothing.
        functional: its pure form.

    Attributes:
        update: what the programs do with the gradients.
        keeps_gradients: whether the gradients of steps outlive them, as ``kept_gradients``, for :meth:`step_again`.
    """

    def __init__(
        self,
        run: RunContext,
        steps: MeshStepRunner,
        optimizer: torch.optim.Optimizer | None,
        functional: FunctionalOptimizer | None,
    ) -> None:
        self._run = run
        self._steps = steps
        self._optimizer = optimizer
        self._functional = functional
        module = run.lightning_module
        self._overridden = gradient_hooks(run)
        self._hooks = StrategyHooks(run)
        scaler = run.precision_plugin.scaler
        if self._hooks.on_gradients:
            self._overridden |= {"the strategy's or precision plugin's hooks"}
        if self._hooks.clips:
            self._overridden.add("configure_gradient_clipping")
        if optimizer is not None and _clears_itself(optimizer):
            self._overridden.add("the optimizer's own zero_grad")
        in_step = frozenset(GRADIENT_HOOKS)
        if scaler is None and any(reads_gradients_between_steps(owner, in_step) for owner in (module, *run.callbacks)):
            self._overridden.add("hooks that read gradients between steps")
        self._eager: EagerOptimization | None = None  # goes on with a batch whose step cannot be compiled
        self._loss: torch.Tensor | None = None  # of that
        self.keeps_gradients = False
        self.kept_gradients: dict[str, Any] | None = None
        self.update = PlannedUpdate(steps, functional, self._plan_clipping_by)

    def _plan_clipping_by(self, algorithm: str | None) -> UpdatePlan:
        run = self._run
        scaler, guard = run.precision_plugin.scaler, guard_of(run.callbacks)
        return UpdatePlan(self._functional, algorithm, self._steps.model.offloads, scaler, guard)

    def _follow_clipping(self) -> None:
        run = self._run
        clips = "configure_gradient_clipping" not in self._overridden
        self.update.follow(run.gradient_clip_val or 0.0, run.gradient_clip_algorithm or "norm" if clips else None)

    def _push_states(self) -> None:
        """A hook may have looked at, and changed, the optimizer's state since the batch began."""
        if (optimizers := self._run.executor.placed_optimizers) is not None:
            optimizers.push()

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """Run a batch: gradients, and the update if ``stepped``."""
        run = self._run
        self._follow_clipping()
        placed = self._steps.place(batch)
        host_values = run.executor.counters(batch_idx)
        accumulate = run.accumulate_grad_batches
        if not self._overridden and not self.keeps_gradients:
            mode = "fused" if stepped else "accumulate"
            self._steps.model.gradients.begin_batch(batch_idx, accumulate)
            if stepped and self._hooks.before_step(self._optimizer):
                self._push_states()
            try:
                step = TrainingStep(self._steps, placed, mode, accumulate, self.update, host_values, self._user_step)
                outcome = self._steps.run(step)
            except Exception as error:
                outcome = run.executor.after_failure(error, lambda: self._go_on_eagerly(batch, batch_idx, stepped))
            else:
                self._hooks.after_training_step()
            if stepped:
                self._hooks.after_step(self._optimizer)
                self._count_step()
            return outcome
        return self._run_with_hooks(batch, placed, batch_idx, stepped, host_values)

    def _go_on_eagerly(self, batch: Any, batch_idx: int, stepped: bool = False) -> StepOutcome:
        """The rest of a batch whose step turned out not to be compilable, from the forward pass on.

        The user's code that ran before it does not run again: what came until here is the beginning of this very step.
        """
        eager = self._run.executor.optimization
        assert isinstance(eager, EagerOptimization)
        self._eager = eager
        found: list[StepOutcome] = []

        def closure() -> torch.Tensor | None:
            outcome, self._loss = eager.differentiate(batch, batch_idx)
            found.append(outcome)
            return self._loss

        eager.update(closure) if stepped and self._optimizer is not None else closure()
        return found[-1]

    def _user_step(self, batch: Any, tracer: ScalarTracer) -> Any:
        return call.step(self._run, "training_step", batch, tracer.counter("batch_idx"))

    def _count_step(self) -> None:
        if self._functional is not None:
            self._functional.notify_step()
        self._hooks.count_step()  # without an optimizer too, as stock counts

    # -- with hooks between backward and update --------------------------------------------------------------------

    def _run_with_hooks(
        self, batch: Any, placed: PlacedBatch, batch_idx: int, stepped: bool, host_values: HostValues
    ) -> StepOutcome:
        run = self._run
        found: list[StepOutcome] = []

        def train() -> StepOutcome:
            self._push_states()
            accumulate = run.accumulate_grad_batches
            step = TrainingStep(self._steps, placed, "split", accumulate, self.update, host_values, self._user_step)
            return self._steps.run(step)

        def closure() -> torch.Tensor | None:
            try:
                outcome = train()
            except Exception as error:
                found.append(run.executor.after_failure(error, lambda: self._go_on_eagerly(batch, batch_idx)))
                return self._loss
            found.append(outcome)
            run.fit_loop.take_logs(outcome)
            self._hooks.after_training_step()
            loss = outcome.result["loss"] if outcome.result else None
            if batch_idx % run.accumulate_grad_batches == 0 and self._optimizer is not None:
                call.hooks(run, "on_before_zero_grad", self._optimizer)
                call.zero_gradients(run, batch_idx, self._optimizer)
            if loss is None:
                self._steps.show_gradients()
                return None
            if "on_before_backward" in self._overridden or self._hooks.on_gradients:
                loss = self._before_backward(loss)
            self._steps.show_gradients()
            call.hooks(run, "on_after_backward")
            self._hooks.post_backward(loss)
            return loss

        if not stepped or self._optimizer is None:
            closure()
            self._end_of_step()
            if stepped:
                self._hooks.count_step()
            return found[0]
        self._step_through_hook(closure, batch_idx)
        self._hooks.count_step()  # as stock: the hook ran, whether or not it took a step
        if not found:
            raise MisconfigurationException(
                "The closure hasn't been executed: it runs forward and backward, so optimizer_step must call "
                "optimizer.step(optimizer_closure)"
            )
        self._end_of_step()
        return found[-1]

    def _end_of_step(self) -> None:
        """Keep the gradients where no optimizer step used them: there was none, or the hook only called the closure."""
        if self._eager is None:
            self._steps.model.gradients.push()

    def _before_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Show the loss, a scalar, to the hooks before backward, which cannot change it any more.

        Raises:
            MisconfigurationException: a hook changed it in place.
        """
        seen = of_captured_graph(loss)
        version = seen._version
        self._hooks.pre_backward(seen)
        call.hooks(self._run, "on_before_backward", seen)
        if seen._version != version:
            raise MisconfigurationException(
                "on_before_backward changed the loss in place, but in a compiled step its gradients exist already: scale the "
                "loss in training_step, or override LightningModule.backward, which is captured"
            )
        return seen

    def _step_through_hook(self, closure: Callable[[], Any], batch_idx: int) -> None:
        """Call the module's ``optimizer_step`` with an optimizer whose ``step`` is the compiled update."""
        run = self._run
        assert self._optimizer is not None
        optimizer = run.strategy._lightning_optimizers[0]
        mesh_run = run.strategy._mesh_run
        mesh_run.step_optimizer = _StepTarget(self).optimizer_step
        optimizer._strategy = run.strategy if self._hooks.steps else _StepTarget(self)
        self._hooks.before_step(self._optimizer)
        try:
            call.module_hook(run, "optimizer_step", run.current_epoch, batch_idx, optimizer, closure)
        finally:
            if self._eager is None:  # else both belong to the eager steps from now on
                optimizer._strategy = mesh_run.step_optimizer = None
        self._hooks.after_step(self._optimizer)

    def take_step(self, closure: Callable[[], Any]) -> Any:
        """Carry out ``optimizer.step(closure)``: closure, hooks, clipping, update."""
        run = self._run
        assert self._optimizer is not None
        loss = closure()
        if self._eager is not None:
            return self._eager.update(lambda: loss)
        if self._steps.model.gradients.shown is None:
            raise MisconfigurationException(
                "optimizer.step() was called without the closure that runs forward and backward; pass optimizer_closure on"
            )
        call.hooks(run, "on_before_optimizer_step", self._optimizer)
        if "configure_gradient_clipping" in self._overridden:
            call.module_hook(
                run,
                "configure_gradient_clipping",
                self._optimizer,
                gradient_clip_val=run.gradient_clip_val,
                gradient_clip_algorithm=run.gradient_clip_algorithm,
            )
        if self.keeps_gradients:
            self.kept_gradients = self._steps.model.gradients.shown.arrays()
        self._push_states()
        self._steps.apply(*self.update.numbers())
        if self._functional is not None:
            self._functional.notify_step()
        return loss

    def step_again(self, forward: Callable[[], Any], batch_idx: int) -> None:
        """Step the optimizer again, after ``forward``, with the gradients of the last step taken under ``keeps_gradients``."""

        def closure() -> Any:
            loss = forward()
            model = self._steps.model
            model.gradients.shown = VisibleGradients(self.kept_gradients or {}, model.state.params, model.strides)
            return loss

        self._step_through_hook(closure, batch_idx)
        self._run.fit_loop.progress.global_step += 1


def _clears_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has its own ``zero_grad``, whose Python runs in every step."""
    return getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad


class _StepTarget:
    """The target that a :class:`~torch_compat.core.optimizer.LightningOptimizer` steps through during ``optimizer_step``."""

    def __init__(self, optimization: AutomaticOptimization) -> None:
        self._optimization = optimization

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(
                f"optimizer.step({', '.join(kwargs)}=…) is not supported by the compiled update; call step(closure=…)"
            )
        return self._optimization.take_step(closure)
