"""Automatic optimization in stock's loop: one program a batch, or two where somebody sees the gradients.

Stock calls ``strategy.optimizer_step(optimizer, closure)``, and the closure calls ``strategy.training_step``, ``zero_grad`` and
``strategy.backward``. Where nobody looks in between, ``training_step`` runs the whole step, update included, and the others have
nothing left to do. Else it runs forward and gradients, ``backward`` shows these as ``p.grad``, and the update follows the hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.trainer import call

from torch_compat.run import hook_calls
from torch_compat.step.gradients import of_captured_graph
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.mesh_steps import TrainingStep
from torch_compat.step.optimization.automatic import GRADIENT_HOOKS
from torch_compat.step.optimization.planned_update import PlannedUpdate
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.update.gradient_readers import reads_gradients_between_steps
from torch_compat.step.update.plan import UpdatePlan
from torch_compat.stock_trainer.capturing import note_loss
from torch_compat.stock_trainer.stock import refuse
from xlatrain.bridge.patches import patched

if TYPE_CHECKING:
    from torch_compat.stock_trainer.run import MeshRun


class AutomaticSteps:
    """The training batches of a run with automatic optimization.

    Args:
        run: the run on the mesh, whose optimizers are placed.
    """

    def __init__(self, run: MeshRun) -> None:
        self._run = run
        module, trainer = run.module, run.trainer
        owners = (module, *trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        self._overridden = {name for name in GRADIENT_HOOKS if any(hook_calls.has_own(name, one) for one in owners)}
        if hook_calls.has_own("clip_gradients", module):
            self._overridden.add("configure_gradient_clipping")  # which calls it
        if any(reads_gradients_between_steps(one, frozenset(GRADIENT_HOOKS)) for one in owners):
            self._overridden.add("hooks that read gradients between steps")
        if any(isinstance(one, StochasticWeightAveraging) for one in owners):
            self._overridden.add("StochasticWeightAveraging")  # its last epoch steps with the gradients of the step before
        for optimizer in run.optimizers:
            if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
                self._overridden.add("the optimizer's own zero_grad")
        self._functional = run.functional if isinstance(run.functional, FunctionalOptimizer) else None
        self._updating = False  # inside of strategy.optimizer_step
        self._updated = False  # the step's program has made the update
        functional, offloads = self._functional, run.model.offloads
        self._update = PlannedUpdate(run.steps, functional, lambda clips_by: UpdatePlan(functional, clips_by, offloads))

    # -- the members of the strategy that stock calls --------------------------------------------------------------------

    def training_step(self, args: tuple[Any, ...]) -> Any:
        """Run forward and gradients, and the update where nobody looks in between. Gives what ``training_step`` returned."""
        run, (batch, *indices) = self._run, args
        accumulate: int = run.trainer.accumulate_grad_batches
        batch_idx: int = run.trainer.fit_loop.epoch_loop.batch_idx
        fused = self._updating and not self._overridden

        def user_step(traced: Any, tracer: ScalarTracer) -> Any:
            counted = [tracer.counter("batch_idx"), *indices[1:]] if indices else []
            output = run.module.training_step(traced, *counted)
            assert run.recorder is not None
            note_loss(run.recorder, output.get("loss") if isinstance(output, dict) else output)
            return output

        with run.explained_shortage():
            run.begin_step()
            if run.trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward:
                placed, values = run.steps.place(batch), run.host_values(batch_idx)
                outcome = run.steps.evaluate("training_step", placed, ("forward alone",), values, user_step)
                loss = run.give_logs(outcome)
                return loss if isinstance(outcome.result, torch.Tensor) else outcome.result
            self._follow_clipping()
            placed = run.steps.place(batch)
            if fused:
                run.model.gradients.begin_batch(batch_idx, accumulate)
            mode = "fused" if fused else "split"
            step = TrainingStep(run.steps, placed, mode, accumulate, self._update, run.host_values(batch_idx), user_step)
            outcome = run.steps.run(step)
        self._updated = fused
        return self._output(outcome)

    def _output(self, outcome: StepOutcome) -> Any:
        loss = self._run.give_logs(outcome)
        result = outcome.result
        if "loss" not in result:  # training_step returned None
            return None
        return {**result, "loss": result["loss"] if loss is None else loss.to(result["loss"].dtype)}

    def backward(self, loss: torch.Tensor, before: Callable[[torch.Tensor], Any], after: Callable[[torch.Tensor], Any]) -> None:
        """Show the gradients of the step, between the hooks around a backward pass; nothing where the update has happened.

        Args:
            before, after: call the hooks.
        """
        if self._updated:
            return
        run, seen = self._run, of_captured_graph(loss)
        version = seen._version
        before(seen)
        if seen._version != version:
            raise refuse(
                "a loss that on_before_backward changes in place",
                "its gradients exist already",
                "scale the loss in training_step",
            )
        run.steps.show_gradients()
        after(loss)
        if not self._updating:
            run.model.gradients.push()  # kept for the batch that steps the optimizer

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        """``optimizer.step(closure)``: the closure, and then what of the step its program has not done."""
        self._updating, self._updated = True, False
        kept = [(optimizer, "zero_grad", _clear_nothing)] if not self._overridden else []
        try:
            with patched(kept):
                result = closure()
        finally:
            self._updating = False
        return result

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """The hooks between gradients and update, and the update, after the closure."""
        run, trainer = self._run, self._run.trainer
        if not self._updated:
            if run.model.gradients.shown is None:
                run.steps.show_gradients()
            call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
            call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
            if "configure_gradient_clipping" in self._overridden:
                call._call_lightning_module_hook(
                    trainer,
                    "configure_gradient_clipping",
                    optimizer,
                    gradient_clip_val=trainer.gradient_clip_val,
                    gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                )
            run.push_states()
            with run.explained_shortage():
                run.steps.apply(*self._update.numbers())
        if self._functional is not None:
            self._functional.notify_step()

    def _follow_clipping(self) -> None:
        trainer = self._run.trainer
        algorithm: Any = trainer.gradient_clip_algorithm or "norm"
        clips = "configure_gradient_clipping" not in self._overridden
        self._update.follow(
            float(trainer.gradient_clip_val or 0.0), str(getattr(algorithm, "value", algorithm)) if clips else None
        )


def _clear_nothing(set_to_none: bool = True) -> None:
    """``optimizer.zero_grad`` in a step whose gradients are used up in its program."""
