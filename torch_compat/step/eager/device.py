"""The torch device on which eager steps run: a GPU where the mesh is of GPUs, else the host's CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import torch

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from torch_compat.plugins.precision import Precision

CPU = torch.device("cpu")


def eager_device(mesh: Mesh) -> torch.device:
    """Torch's name of this process's first device of the mesh, where torch has it too."""
    own = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    if own.platform != "gpu" or not torch.cuda.is_available():
        return CPU
    return torch.device("cuda", own.local_hardware_id)


def note(mesh: Mesh) -> str:
    """A note about eager steps on a mesh of GPUs, as the beginning of a text; empty for other meshes."""
    if mesh.devices.flat[0].platform != "gpu":
        return ""
    if not torch.cuda.is_available():
        return f"(The mesh is of GPUs, but this torch, {torch.__version__}, has no CUDA: install one that has.) "
    return "(JAX has reserved most of the GPU's memory: if torch lacks it, set XLATRAIN_EXECUTOR=eager, and JAX reserves none.) "


class EagerDevice:
    """A module and its optimizers on the device of eager steps, for a run; on the host's CPU there is nothing to do.

    Args:
        module: the LightningModule, which is moved, its metrics too. Parameters stay the objects that they are.
        precision: autocast's op lists become those of the device.
        device: the device of eager steps.

    Attributes:
        device: the device of eager steps.
    """

    def __init__(self, module: torch.nn.Module, precision: Precision, device: torch.device) -> None:
        self.device = device
        self._module, self._precision = module, precision
        self._move(device)

    @property
    def is_host(self) -> bool:
        """Whether it is the host's CPU."""
        return self.device.type == "cpu"

    def take_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Move the state that they have already, of an earlier run or of compiled steps, to their parameters."""
        if not self.is_host:
            _move_state(optimizers, self.device)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of a batch, on the device."""
        return tensor.to(self.device)

    def release(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give module and optimizers host tensors again."""
        if not self.is_host:
            self._move(CPU)
            _move_state(optimizers, CPU)

    def random_state(self) -> dict[str, Any]:
        """The device's random stream; the host's is saved with every run."""
        return {} if self.is_host else {"device_rng": torch.get_device_module(self.device).get_rng_state()}

    def load_random_state(self, state: Mapping[str, Any]) -> None:
        """Continue the stream of a checkpoint; one that ran elsewhere has none of this device."""
        if not self.is_host and "device_rng" in state:
            torch.get_device_module(self.device).set_rng_state(state["device_rng"])

    def _move(self, device: torch.device) -> None:
        if self.is_host:
            return
        self._module.to(device)
        self._precision.device = device.type


def _move_state(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Scalars (Adam's step) stay on the host, where torch keeps them."""
    for optimizer in optimizers:
        for leaves in optimizer.state.values():
            moved = {key: leaf.to(device) for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.ndim}
            leaves.update(moved)
