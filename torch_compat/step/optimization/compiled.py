"""Optimization of a compiled run: optimizers in pure form, their state on the mesh, and runners of training batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimization.automatic import AutomaticOptimization, gradient_hooks
from torch_compat.step.optimization.manual import ManualOptimization
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.step.optimizers.traced import TracedOptimizers
from torch_compat.step.run_context import RunContext
from torch_compat.step.update.offload import check_offloaded


@dataclass(frozen=True)
class CompiledOptimization:
    """The optimization of a run whose steps are compiled.

    Attributes:
        batches: the runner of training batches.
        functional: the pure form of the optimizer, or of all in manual optimization; None where nothing is optimized.
        traced: the stand-ins for optimizers and schedulers while a step is captured.
    """

    batches: AutomaticOptimization | ManualOptimization
    functional: FunctionalOptimizer | OptimizerSet | None
    traced: TracedOptimizers


def compiled_optimization(run: RunContext, steps: MeshStepRunner) -> CompiledOptimization:
    """Make the state of ``trainer.optimizers`` on the mesh, or move there the state that they have.

    Raises:
        UnsupportedOptimizerError: an optimizer cannot be compiled.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in steps.model.params.items()}
    # Hooks that see gradients of a scaled loss do so inside of the program, which scales it and takes the step.
    scaled = run.scaler is not None and bool(run.optimizers) and bool(gradient_hooks(run))
    manual = not run.lightning_module.automatic_optimization or len(run.optimizers) > 1 or scaled
    schedulers = [config.scheduler for config in run.lr_scheduler_configs]
    traced = TracedOptimizers(run.optimizers, schedulers, names, may_step=manual)
    return _manual(run, steps, names, traced) if manual else _automatic(run, steps, names, traced)


def _automatic(
    run: RunContext, steps: MeshStepRunner, names: Mapping[torch.Tensor, str], traced: TracedOptimizers
) -> CompiledOptimization:
    optimizer = run.optimizers[0] if run.optimizers else None
    functional = None
    if optimizer is None:
        steps.model.add_optimizer(lambda params: {})
    else:
        functional = FunctionalOptimizer.from_torch(optimizer, names)
        _place(run, steps.model, functional, [functional])
    _scale_loss(run, steps.model)
    return CompiledOptimization(AutomaticOptimization(run, steps, optimizer, functional), functional, traced)


def _manual(
    run: RunContext, steps: MeshStepRunner, names: Mapping[torch.Tensor, str], traced: TracedOptimizers
) -> CompiledOptimization:
    optimizers = OptimizerSet([FunctionalOptimizer.from_torch(optimizer, names) for optimizer in run.optimizers])
    _place(run, steps.model, optimizers, optimizers.optimizers)
    _scale_loss(run, steps.model)
    return CompiledOptimization(ManualOptimization(run, steps, optimizers, traced), optimizers, traced)


def _place(
    run: RunContext, model: ModelState, functional: FunctionalOptimizer | OptimizerSet, each: Sequence[FunctionalOptimizer]
) -> None:
    """The state of ``functional``, which consists of ``each``, on the mesh."""
    _check_scaled(run, each)
    if model.offloads:
        check_offloaded(run, each)
    model.add_optimizer(functional.init)
    if any(optimizer.state for optimizer in run.optimizers):
        model.load_optimizer(functional.import_state)


def _scale_loss(run: RunContext, model: ModelState) -> None:
    if run.scaler is not None:
        model.scale_loss(run.precision_plugin.begin_scaling())


def _check_scaled(run: RunContext, optimizers: Sequence[FunctionalOptimizer]) -> None:
    """A compiled step with loss scaling may have to be taken back, for which an optimizer's state must be there before."""
    for one in optimizers:
        if run.scaler is not None and one.makes_state_in_step:
            raise UnsupportedOptimizerError(
                f"{type(one.optimizer).__name__} makes its state in its first step, which precision='16-mixed' may have to "
                "skip: use one of torch.optim, or precision='bf16-mixed'"
            )
