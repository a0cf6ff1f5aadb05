"""Optimization of a compiled run: optimizers in pure form, their state on the mesh, and the runner of training batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_compat.step.optimization.automatic import AutomaticOptimization, gradient_hooks
from torch_compat.step.optimization.manual import ManualOptimization
from torch_compat.step.optimizers.forms import form_in_step, functional_form
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.inline import InlineOptimizer
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.step.placed_run import PlacedRun
from torch_compat.step.run_context import RunContext
from torch_compat.step.update.offload import check_offloaded


def compiled_optimization(run: RunContext, placed: PlacedRun) -> AutomaticOptimization | ManualOptimization:
    """Make the state of ``trainer.optimizers`` on the mesh, or move there the state that they have. Gives the runner of batches.

    Raises:
        UnsupportedOptimizerError: an optimizer cannot be compiled.
    """
    # Hooks that see gradients of a scaled loss do so inside of the program, which scales it and takes the step.
    scaled = run.scaler is not None and bool(run.optimizers) and bool(gradient_hooks(run))
    each = [_functional(optimizer, placed) for optimizer in run.optimizers]
    in_step = any(isinstance(one, InlineOptimizer) for one in each)
    manual = not run.lightning_module.automatic_optimization or len(run.optimizers) > 1 or scaled or in_step
    if manual or each:
        _check_scaled(run, each)
        if placed.model.offloads:
            check_offloaded(run, each)
    functional = OptimizerSet(each) if manual else each[0] if each else None
    schedulers = [config.scheduler for config in run.lr_scheduler_configs]
    placed.place_optimizers(functional, run.optimizers, schedulers, steps_them=manual)
    if run.scaler is not None:
        placed.model.scale_loss(run.precision_plugin.begin_scaling())
    if isinstance(functional, OptimizerSet):
        return ManualOptimization(run, placed.steps, functional)
    return AutomaticOptimization(run, placed.steps, run.optimizers[0] if each else None, functional)


def _functional(optimizer: torch.optim.Optimizer, placed: PlacedRun) -> FunctionalOptimizer:
    """The optimizer in pure form; where its step is no function of gradients alone, its Python runs in the captured step."""
    try:
        return functional_form(optimizer, placed.names)
    except UnsupportedOptimizerError:
        return form_in_step(optimizer, placed.names)


def _check_scaled(run: RunContext, optimizers: Sequence[FunctionalOptimizer]) -> None:
    """A compiled step with loss scaling may have to be taken back, for which an optimizer's state must be there before."""
    for one in optimizers:
        if run.scaler is not None and one.makes_state_in_step:
            raise UnsupportedOptimizerError(
                f"{type(one.optimizer).__name__} makes its state in its first step, which precision='16-mixed' may have to "
                "skip: use one of torch.optim, or precision='bf16-mixed'"
            )
