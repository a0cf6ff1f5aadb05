"""Strategies whose devices torch itself drives: the eager executor runs user code on them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

from torch_compat.device_backends import DeviceBackend, PlacedModule
from torch_compat.strategies.parallel import ParallelStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.cluster import distributed
from xlatrain.mesh.sharding import replicated


class DeviceStrategy(ParallelStrategy):
    """A strategy over torch's own devices; JAX keeps host devices only, one for each (:mod:`torch_compat.device_backends`).

    Attributes:
        backend: what drives the devices; set when a Trainer takes the strategy.
        on_device: the module of the run that is on.
    """

    backend: DeviceBackend
    on_device: PlacedModule | None = None
    _state_shardings: Mapping[int, NamedSharding] = MappingProxyType({})

    @abstractmethod
    def make_backend(self, platform: str | None, devices: int | None) -> DeviceBackend:
        """Start what drives the devices: ``devices`` per process, None for all."""

    def start_backend(self, platform: str | None, devices: Any) -> None:
        """Take the devices that the Trainer's flags come to.

        Raises:
            MisconfigurationException: there are no such devices, or JAX holds the chips already.
        """
        if (started := _started_platform()) not in (None, "cpu"):
            raise MisconfigurationException(
                f"{type(self).__name__}: JAX has been started on {started} in this process, and holds its devices; make "
                "this Trainer before anything uses JAX, or set JAX_PLATFORMS=cpu"
            )
        self.backend = self.make_backend(platform, self._count(devices))

    def take_hosts(self, hosts: Sequence[Any]) -> None:
        """Take the JAX devices that stand for those of the backend, as many for each process.

        Raises:
            MisconfigurationException: the processes that joined are not those of the backend.
        """
        self.take_devices(self._in_order_of_backend(hosts))
        self.backend.use_mesh(self.mesh, self._mesh_run.devices)

    def _count(self, devices: Any) -> int | None:
        if devices in ("auto", -1, "-1"):
            return None
        if isinstance(devices, str) and devices.strip().isdigit():
            devices = int(devices)
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise MisconfigurationException(
                f"{type(self).__name__}: devices={devices!r}; expected a number of devices, 'auto' or -1 (to choose them, set "
                "the backend's own environment variables)"
            )
        return devices

    def _in_order_of_backend(self, hosts: Sequence[Any]) -> list[Any]:
        """The host devices in the order of the backend's devices: for each, a device of the same process."""
        backend = self.backend
        worlds = distributed.all_gather_object((backend.process_count, backend.process_index, backend.local_positions()))
        if any((count, index) != (len(worlds), process) for process, (count, index, _) in enumerate(worlds)):
            found = ", ".join(f"{index} of {count}" for count, index, _ in worlds)
            raise MisconfigurationException(
                f"{type(self).__name__}: {len(worlds)} process(es) joined, which are {found} for {backend.name}; start one "
                "process per host of the TPU slice (docs/pods.md), each with all its chips"
            )
        order: dict[int, Any] = {}
        for process, (_, _, positions) in enumerate(worlds):
            local = [device for device in hosts if device.process_index == process]
            order.update(zip(positions, local, strict=True))
        return [order[position] for position in sorted(order)]

    @property
    def root_device(self) -> torch.device:
        """The torch device on which user code runs."""
        return self.backend.root_device

    def setup_environment(self) -> None:
        _ = self.mesh  # made now, before a hook of the user's runs
        self.precision_plugin.device = self.root_device.type  # whose autocast lists apply

    def module_placed(self, module: torch.nn.Module) -> None:
        """Called after the module's parameters were moved to the devices."""

    def module_released(self) -> None:
        """Called before the module's parameters leave the devices."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        self._state_shardings = {} if self.on_device is None else self.on_device.state_shardings(self.optimizers)
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        finally:
            self._state_shardings = {}

    def _array_of(self, tensor: torch.Tensor) -> jax.Array | None:
        """A tensor on the devices as an array of the host mesh, shard by shard; for a checkpoint."""
        if not self.backend.owns(tensor):
            return super()._array_of(tensor)
        found = self._state_shardings.get(id(tensor))
        if found is None:
            found = replicated(self.mesh) if self.on_device is None else self.on_device.sharding_of(tensor)
        return self.backend.array_of(tensor, found)


def _started_platform() -> str | None:
    """The platform that JAX was started on; None: it was not."""
    from jax._src import xla_bridge

    return jax.default_backend() if xla_bridge.backends_are_initialized() else None
