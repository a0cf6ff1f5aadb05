"""Manual optimization in stock's loop: ``training_step`` with its backward passes and optimizer steps is one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.run import hook_calls
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.mesh_steps import UpdatingStep
from torch_compat.step.optimizers.host_part import HostPart
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.stock_trainer.capturing import entered
from torch_compat.stock_trainer.stock import refuse
from xlatrain.bridge.patches import patched

if TYPE_CHECKING:
    from torch_compat.stock_trainer.run import MeshRun


class ManualSteps:
    """The training batches of a run with manual optimization.

    Args:
        run: the run on the mesh, whose optimizers are placed.
        wrapped: stock's wrappers of the optimizers, which user code steps.
    """

    def __init__(self, run: MeshRun, wrapped: list[Any]) -> None:
        self._run, self._wrapped = run, wrapped
        assert isinstance(run.functional, OptimizerSet)
        self._host = HostPart(run.functional, run.model.replicate)
        run.model.gradients.are_kept = True

    def training_step(self, args: tuple[Any, ...]) -> Any:
        """Run a batch; gives what ``training_step`` returned."""
        run, (batch, *indices) = self._run, args
        with run.explained_shortage():
            run.begin_step()
            placed = run.steps.place(batch)
            host_values = run.host_values(run.trainer.fit_loop.epoch_loop.batch_idx)

            def user_step(traced: Any, tracer: ScalarTracer) -> Any:
                counted = [tracer.counter("batch_idx"), *indices[1:]] if indices else []
                names = ("_on_before_step", "_on_after_step")
                counting = zip(names, (_nothing, lambda: tracer.advance("global_step")), strict=True)
                with patched([(one, name, count) for name, count in counting for one in self._wrapped]):
                    return run.module.training_step(traced, *counted)

            step = UpdatingStep(run.steps, placed, self._host, host_values, user_step)
            outcome = run.steps.run(step)
        for _ in range(step.steps):  # what stock's loop counts around a step
            self._wrapped[0]._on_before_step()
            self._wrapped[0]._on_after_step()
        run.give_logs(outcome)
        return outcome.result

    # -- in the captured step ----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``manual_backward``: the module's ``backward``, and the hooks around it."""
        self._check_captured("manual_backward()")
        self._call("on_before_backward", loss)
        self._run.module.backward(loss, *args, **kwargs)
        self._call("on_after_backward")
        return loss.detach()

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """``optimizer.step(closure)``: a node of the graph, after the closure and the hook."""
        self._check_captured("optimizer.step()")

        def with_hook() -> Any:
            loss = closure()
            self._call("on_before_optimizer_step", optimizer)
            return loss

        return optimizer.step(closure=with_hook, **kwargs)

    def _check_captured(self, what: str) -> None:
        if self._run.tracer is None:
            raise refuse(f"{what} outside of training_step", "the gradients of a compiled step do not leave its program")

    def _call(self, hook: str, *args: Any) -> None:
        run = self._run
        with entered(run.module, hook):
            for callback in run.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
                if hook_calls.has_own(hook, callback):
                    getattr(callback, hook)(run.trainer, run.module, *args)
            if hook_calls.has_own(hook, run.module):
                getattr(run.module, hook)(*args)


def _nothing() -> None:
    """Stock's count of a step that begins, while it is captured."""
