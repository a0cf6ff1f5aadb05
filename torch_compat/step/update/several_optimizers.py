"""Automatic optimization with several optimizers, as eras 1.x have it: ``training_step`` with ``optimizer_idx`` for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torch_compat.run import hook_calls as call
from torch_compat.step.capture.loss import closure_loss, outputs_with
from torch_compat.step.run_context import RunContext
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.signature_utils import is_param_in_hook_signature

_ONLY_BY_HAND = (
    "Training with multiple optimizers is only supported with manual optimization: set "
    "`self.automatic_optimization = False`, take the `optimizer_idx` out of `training_step`, and step each of "
    "`self.optimizers()` in there."
)


def refuse_optimizer_idx(run: RunContext) -> None:
    """Raises:
    RuntimeError: a module of 2.x whose ``training_step`` wants an ``optimizer_idx`` from automatic optimization.
    """
    module = run.lightning_module
    if not module.automatic_optimization or (run.era is not None and run.era.module is not None):
        return
    if is_param_in_hook_signature(module.training_step, "optimizer_idx", explicit=True):
        raise RuntimeError(_ONLY_BY_HAND)


def check_several(run: RunContext) -> None:
    """Whether the module can be trained with several optimizers by the loop.

    Raises:
        RuntimeError: a module of 2.x, as in stock.
        MisconfigurationException: a step without ``optimizer_idx``, or gradient accumulation.
    """
    module = run.lightning_module
    if run.era is None or run.era.module is None:
        raise RuntimeError(_ONLY_BY_HAND)
    if "optimizer_idx" not in inspect.signature(module.training_step).parameters:
        raise MisconfigurationException(
            f"Your LightningModule defines {len(run.optimizers)} optimizers but training_step is missing the `optimizer_idx` "
            "argument"
        )
    if run.accumulate_grad_batches > 1:
        raise MisconfigurationException(
            f"Trainer(accumulate_grad_batches={run.accumulate_grad_batches}) with several optimizers under automatic "
            "optimization is not offered: set `self.automatic_optimization = False` and accumulate in training_step"
        )


def run_several(run: RunContext, training_step: Callable[..., Any], batch: Any, batch_idx: Any) -> list[dict[str, Any]]:
    """Run a batch: for each optimizer its own forward, backward and step; gives the hooks' ``outputs``, one for each.

    Only the optimizer's parameters require gradients in its pass. On a mesh all of it is one program.
    """
    return [_one(run, training_step, batch, batch_idx, index) for index in range(len(run.optimizers))]


def _one(run: RunContext, training_step: Callable[..., Any], batch: Any, batch_idx: Any, index: int) -> dict[str, Any]:
    module: Any = run.lightning_module
    optimizer = run.strategy._lightning_optimizers[index]
    plain = run.optimizers[index]
    found: dict[str, Any] = {}

    def closure() -> torch.Tensor | None:
        output = training_step(batch, batch_idx, index)
        loss = closure_loss(output)
        found.clear()
        if loss is not None:
            found.update(outputs_with(loss.detach().clone(), output))
        call.hooks(run, "on_before_zero_grad", plain)
        call.zero_gradients(run, batch_idx, optimizer)
        if loss is not None:
            run.strategy.backward(loss, plain)
        return loss

    module.toggle_optimizer(optimizer)
    try:
        call.module_hook(run, "optimizer_step", run.current_epoch, batch_idx, optimizer, closure)
    finally:
        module.untoggle_optimizer(optimizer)
    return found
