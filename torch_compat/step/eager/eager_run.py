"""A run whose steps are eager: its module and optimizers on the device of the steps, and their runner."""

from __future__ import annotations

import contextlib

import torch

from torch_compat.plugins.loss_scaling import LossScaling
from torch_compat.step.eager.device import EagerDevice, eager_device
from torch_compat.step.eager.eager import EagerSteps
from torch_compat.step.eager.whole_batch import WholeBatches
from torch_compat.step.run_context import RunContext
from torch_compat.utilities.host_collectives import replicated_eager
from xlatrain.cluster.distributed import world
from xlatrain.mesh.batch_layout import BatchLayout


class EagerRun:
    """A module on the device of eager steps, with the values that it has.

    Args:
        run: the run.
        reason: why steps are not compiled.
        contexts: closed when the run ends.

    Attributes:
        steps: the runner.
        device: the device.
        loss_scaling: of ``precision="16-mixed"``.
    """

    def __init__(self, run: RunContext, reason: str, contexts: contextlib.ExitStack) -> None:
        self._run = run
        plugin, mesh = run.precision_plugin, run.strategy.mesh
        self.loss_scaling: LossScaling | None = None
        if run.scaler is not None:
            state = plugin.begin_scaling()  # which may change the scaler
            self.loss_scaling = LossScaling.of_state(run.scaler, state)
        if run._detect_anomaly:
            contexts.enter_context(torch.autograd.set_detect_anomaly(True))
        module = plugin.convert_module(run.lightning_module)
        whole = None
        if world().process_count > 1:
            whole = WholeBatches(BatchLayout.from_mesh(mesh))
            contexts.enter_context(replicated_eager())
        self.device = EagerDevice(module, plugin, eager_device(mesh))
        run.strategy._mesh_run.device = self.device.device
        self.steps = EagerSteps(plugin, reason, whole, self.device)

    def place_optimizers(self) -> None:
        """Move the state that the optimizers have already to their parameters."""
        self.device.take_optimizers(self._run.optimizers)

    def release(self) -> None:
        """Give module and optimizers host tensors again."""
        self.device.release(self._run.optimizers)
