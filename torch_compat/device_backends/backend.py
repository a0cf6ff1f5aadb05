"""The interface between the eager executor and the package that drives torch's devices."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_compat.utilities.host_arrays import place
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import as_numpy, from_numpy


class DeviceBackend(ABC):
    """A torch device on which user code runs; this class is a device that is a single piece of hardware.

    Attributes:
        name: the package.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        root_device: the torch device of user code.
        local_devices: devices of this process.
        process_count, process_index: of the backend's own world.
    """

    name = ""
    platform = "tpu"
    local_devices = 1
    process_count = 1
    process_index = 0

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The torch device of user code."""

    def local_positions(self) -> list[int]:
        """The positions of this process's devices among all."""
        return [0]

    def use_mesh(self, mesh: Mesh, stand_ins: Sequence[Any]) -> None:  # noqa: B027 — one device has nothing to split
        """Split tensors over the devices as ``mesh`` says.

        Args:
            mesh: of host devices.
            stand_ins: the host device that stands for each device, in the backend's order.
        """

    def step(self) -> AbstractContextManager[Any]:
        """The context of one dispatch."""
        return contextlib.nullcontext()

    def compiled(self) -> int:
        """Programs compiled so far in this process."""
        return 0

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the devices."""
        return tensor.device.type == self.root_device.type

    def put(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        """A whole tensor, the same on every process, on the devices."""
        return tensor.to(self.root_device)

    def put_rows(self, tensor: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """The global tensor of which this process has these rows, split along dim 0 over mesh axes."""
        return self.put(tensor, PartitionSpec(axes))

    def put_array(self, array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
        """An array of the host mesh as a tensor of ``dtype`` that is split the same way."""
        return from_numpy(np.array(array)).to(dtype).to(self.root_device)

    def array_of(self, tensor: torch.Tensor, sharding: NamedSharding) -> jax.Array:
        """A copy of a tensor on the host mesh, shard by shard where it is split in this way on the devices."""
        return place(host_array(tensor), sharding)

    def annotate(self, tensor: torch.Tensor, spec: PartitionSpec) -> None:  # noqa: B027 — as above
        """Have a tensor that was computed on the devices split in this way."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Start the devices' random stream."""

    @abstractmethod
    def random_state(self) -> int | torch.Tensor:
        """The position of the devices' random stream."""

    @abstractmethod
    def set_random_state(self, state: Any) -> None:
        """Continue the devices' random stream."""


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values in the dtype that JAX has for its own."""
    host = tensor.detach().cpu()
    return np.asarray(as_numpy(host)).astype(jax_dtype(tensor.dtype), copy=False)
