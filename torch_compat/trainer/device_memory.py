"""A run that needs more memory than a device has: an error that says what takes it, and which arguments to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from xlatrain.device_memory import Shortage, explained

if TYPE_CHECKING:
    from torch_compat.strategies.strategy import Strategy
    from torch_compat.trainer.trainer import Trainer


@contextlib.contextmanager
def explained_shortage(trainer: Trainer) -> Iterator[None]:
    """Around a run.

    Raises:
        OutOfDeviceMemory: where XLA raised ``RESOURCE_EXHAUSTED``.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        shortage = Shortage.of(error)
        if shortage is None:
            raise
        strategy = trainer.strategy
        state = None if strategy.placed is None else strategy.placed.as_left
        raise explained(shortage, state, advice(strategy, trainer.precision)) from error


def advice(strategy: Strategy, precision: str) -> Iterator[str]:
    """Arguments that would lower what a device holds, the cheapest first."""
    mesh = strategy.mesh
    if precision == "32-true":
        yield "precision='bf16-mixed': activations take half"
    if mesh.devices.size > 1 and mesh.shape.get("fsdp", 1) == 1:
        yield f"strategy='fsdp': parameters, gradients and optimizer state are split over the {mesh.devices.size} devices"
    elif mesh.shape.get("fsdp", 1) > 1 and strategy.rules.offload is None:
        yield "MeshStrategy(offload='optimizer') or FSDPStrategy(offload='optimizer'): its state lies in host memory"
    if not strategy.remat:
        yield "MeshStrategy(remat=['…layers.*']) or torch.utils.checkpoint: activations are computed again instead of kept"
    yield "a smaller batch_size, with accumulate_grad_batches for the same updates"
    yield "more devices" if mesh.shape.get("fsdp", 1) > 1 or mesh.devices.size == 1 else "more devices, split by fsdp or tensor"
    yield "`xlatrain preflight --topology … train.py` says what a run needs, and what of this would do, without running it"
