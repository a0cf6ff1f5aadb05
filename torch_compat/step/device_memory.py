"""A run that needs more memory than a device has: an error that says what takes it, and which arguments to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch_compat.step.run_context import RunContext, StepStrategy
from xlatrain.step import device_memory


def explained_shortage(run: RunContext) -> AbstractContextManager[None]:
    """Explain a shortage of device memory in a run.

    Raises:
        OutOfDeviceMemory: where XLA raised ``RESOURCE_EXHAUSTED``.
    """
    strategy = run.strategy
    return device_memory.explained_shortage(
        lambda: None if strategy.placed is None else strategy.placed.raw_state,
        lambda: advice(strategy, run.precision_plugin.precision),
    )


def advice(strategy: StepStrategy, precision: str, *, of_fabric: bool = False) -> Iterator[str]:
    """Arguments of the Trainer, or of Fabric, that would lower what a device holds, the cheapest first."""
    mesh = strategy.mesh
    if precision == "32-true":
        yield "precision='bf16-mixed': activations take half"
    if mesh.devices.size > 1 and mesh.shape.get("fsdp", 1) == 1:
        yield f"strategy='fsdp': parameters, gradients and optimizer state are split over the {mesh.devices.size} devices"
    elif mesh.shape.get("fsdp", 1) > 1 and strategy.rules.offload is None:
        yield "MeshStrategy(offload='optimizer') or FSDPStrategy(offload='optimizer'): its state lies in host memory"
    if not strategy.remat:
        yield "MeshStrategy(remat=['…layers.*']) or torch.utils.checkpoint: activations are computed again instead of kept"
    if of_fabric:
        yield "smaller batches, and fabric.backward of several of them before optimizer.step()"
    else:
        yield "a smaller batch_size, with accumulate_grad_batches for the same updates"
    yield "more devices" if mesh.shape.get("fsdp", 1) > 1 or mesh.devices.size == 1 else "more devices, split by fsdp or tensor"
    if not of_fabric:
        yield "`xlatrain preflight --topology … train.py` says what a run needs, and what of this would do, without running it"
