"""The calls of a training batch into the user's code, in Lightning's order, whoever executes them.

The eager executor runs this on real tensors; the compiled one captures the manual form once, on traced tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_compat.core.module import LightningModule
from torch_compat.plugins.loss_scaling import LossScaling
from torch_compat.run import hook_calls as call
from torch_compat.step.capture.loss import closure_loss, outputs_with
from torch_compat.step.run_context import RunContext
from torch_compat.step.update.several_optimizers import run_several
from torch_compat.step.update.strategy_hooks import StrategyHooks
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.capturing import is_capturing


class UserStep:
    """``training_step``, backward and the optimizers' steps with the hooks around them.

    It is what ``manual_backward`` and the run's :class:`~torch_compat.core.optimizer.LightningOptimizer` objects reach.

    Args:
        run: the run.
        optimizers: of the run.
        forward_context: around ``training_step``.

    Attributes:
        hooks: the strategy's.
        scaling: loss scaling of backward passes and optimizer steps (``precision="16-mixed"``), or None.
        steps_once: whether a batch is one pass with one optimizer, made by :meth:`automatic`; else by :meth:`manual`.
    """

    def __init__(
        self,
        run: RunContext,
        optimizers: list[torch.optim.Optimizer],
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._run = run
        self._optimizers = optimizers
        self._forward_context = forward_context
        self.hooks = StrategyHooks(run)
        self.scaling: LossScaling | None = None
        self.steps_once = run.lightning_module.automatic_optimization and len(optimizers) <= 1
        mesh_run = run.strategy._mesh_run
        mesh_run.backward, mesh_run.step_optimizer = self.backward, self.optimizer_step
        for wrapped in run.strategy._lightning_optimizers:
            wrapped._strategy = run.strategy if self.hooks.steps else self
            if not self.steps_once:
                wrapped._on_after_step = self.count_step

    @property
    def lightning_module(self) -> LightningModule:
        """The module (``LightningOptimizer.toggle_model`` asks for it)."""
        return self._run.lightning_module

    def automatic(self, batch: Any, batch_idx: int, stepped: bool) -> dict[str, Any]:
        """A batch of automatic optimization; gives what hooks get as ``outputs``."""
        run = self._run
        found: dict[str, Any] = {}

        def closure() -> torch.Tensor | None:
            return self.differentiate(batch, batch_idx, found)

        if not stepped or not self._optimizers:
            closure()
            if stepped:
                self.count_step()
        else:
            optimizer = run.strategy._lightning_optimizers[0]
            call.module_hook(run, "optimizer_step", run.current_epoch, batch_idx, optimizer, closure)
            self.count_step()
        return found

    @torch.enable_grad()  # an optimizer's step may be under no_grad as a whole
    def differentiate(self, batch: Any, batch_idx: int, found: dict[str, Any]) -> torch.Tensor | None:
        """The closure of an optimizer's step: forward, the hooks around ``zero_grad`` and backward. Gives the loss.

        Args:
            batch, batch_idx: as ``training_step`` gets them.
            found: is filled with what hooks get as ``outputs``.
        """
        run = self._run
        output = self._training_step(batch, batch_idx)
        loss = closure_loss(output)
        found.clear()
        if loss is not None:
            loss = loss / run.accumulate_grad_batches
            found.update(outputs_with(loss.detach().clone(), output))
        if batch_idx % run.accumulate_grad_batches == 0 and self._optimizers:
            call.hooks(run, "on_before_zero_grad", self._optimizers[0])
            call.zero_gradients(run, batch_idx, self._optimizers[0])
        if loss is not None:
            run.strategy.backward(loss, self._optimizers[0] if self._optimizers else None)
        return loss

    def manual(self, batch: Any, batch_idx: Any) -> Any:
        """A batch of manual optimization; gives what hooks get as ``outputs``.

        Raises:
            MisconfigurationException: ``training_step`` returned something else than a tensor, a dict or None.
        """
        if self._run.lightning_module.automatic_optimization:
            return run_several(self._run, self._training_step, batch, batch_idx)
        output = self._training_step(batch, batch_idx)
        if isinstance(output, dict):
            return {key: value.detach() if key == "loss" else value for key, value in output.items()}  # the others as they are
        if isinstance(output, torch.Tensor):
            return {"loss": output.detach()}
        if output is not None:
            raise MisconfigurationException(
                "in manual optimization, `training_step` must either return a Tensor or have no return, not "
                f"{type(output).__name__}"
            )
        return {}

    def _training_step(self, batch: Any, *indices: Any) -> Any:
        with self._forward_context():
            output = call.step(self._run, "training_step", batch, *indices)
        if not is_capturing():
            self.hooks.after_training_step()
        return output

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """``manual_backward``: the module's ``backward`` and the hooks around it, which get the scaled loss, as in stock."""
        run = self._run
        if self.scaling is not None:
            loss = self.scaling.scale_loss(loss)
        call.hooks(run, "on_before_backward", loss)
        call.module_hook(run, "backward", loss, *args, **kwargs)
        call.hooks(run, "on_after_backward")

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """``optimizer.step(closure)``: closure, hooks, clipping, update."""
        self.hooks.before_step(optimizer)
        result = self.update(optimizer, closure, **kwargs)
        self.hooks.after_step(optimizer)
        return result

    def update(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """:meth:`optimizer_step` between the strategy's hooks."""

        def with_hooks() -> Any:
            loss = closure()
            self._before_update(optimizer)
            return loss

        if self.scaling is None:
            return optimizer.step(closure=with_hooks, **kwargs)
        return self._scaled_step(self.scaling, optimizer, closure, **kwargs)

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Hooks and clipping between gradients and update."""
        run = self._run
        call.hooks(run, "on_before_optimizer_step", optimizer)
        if run.lightning_module.automatic_optimization:
            call.module_hook(
                run,
                "configure_gradient_clipping",
                optimizer,
                gradient_clip_val=run.gradient_clip_val,
                gradient_clip_algorithm=run.gradient_clip_algorithm,
            )

    def _scaled_step(
        self, scaling: LossScaling, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """A step with gradients of a scaled loss: hooks see the real ones; nothing changes where one is not finite."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(
                "AMP and the LBFGS optimizer are not compatible: the loss is scaled once a step, while LBFGS "
                "computes it several times. Use precision='bf16-mixed'."
            )
        loss = closure()
        if loss is None and self._run.lightning_module.automatic_optimization:  # training_step gave no loss
            self._before_update(optimizer)
            return loss
        scaling.unscale_(param for group in optimizer.param_groups for param in group["params"])
        self._before_update(optimizer)
        # A captured step() looks at `scaling.overflowed` itself.
        result = optimizer.step(**kwargs) if is_capturing() or not scaling.overflowed else None
        scaling.update()
        return result

    def count_step(self) -> None:
        """An optimizer took a step."""
        tracer = self._run.executor.tracer
        if tracer is not None:
            tracer.advance("global_step")
        else:
            self.hooks.count_step()
