"""Fabric's data parallelism: every process computes its rows, gradients are averaged over processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import jax
import torch
from torch import Tensor
from torch.nn import Module

from torch_compat.fabric.strategies.strategy import NothingToSkip, Strategy
from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies.ddp import TIMEOUT, refuse_start_method, tell_tuning
from torch_compat.strategies.parallel_devices import ParallelDevices
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_collectives import OneDeviceCollectives, ProcessCollectives
from torch_compat.utilities.registry import StrategyRegistryType


class OnHost(ProcessCollectives, Strategy):
    """A strategy of Fabric with nothing left abstract."""

    @property
    def root_device(self) -> torch.device:
        """The device on which user code puts tensors; they go to the mesh from there."""
        return torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        return jax.process_index() == 0

    def module_to_device(self, module: Module) -> None:
        module.to(self.root_device)

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)


class SingleDeviceStrategy(OneDeviceCollectives, OnHost):
    """A process with plain torch on its host. API: ``lightning.fabric.strategies.SingleDeviceStrategy``."""

    name = "single_device"

    def __init__(
        self,
        device: Any = "cpu",
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision=precision)
        self._device = torch.device(device)

    @property
    def root_device(self) -> torch.device:
        return self._device

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        strategy_registry.register(cls.name, cls, description=cls.__name__, override=True)


class ParallelStrategy(ParallelDevices, OnHost):
    """A strategy for several devices. API: ``lightning.fabric.strategies.ParallelStrategy``.

    Args:
        accelerator: the hardware.
        parallel_devices: a torch device for each of this process; which JAX devices they are says ``Fabric(devices=…)``.
        cluster_environment: which world this process joins; None: what started it says.
        checkpoint_io: how checkpoints reach storage.
        precision: dtypes.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision=precision)
        self._parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Documented for samplers that users make themselves: they are re-expanded to the global stream."""
        return {"num_replicas": 1, "rank": 0} if self._mesh is None else self._mesh.distributed_sampler_kwargs


class DDPStrategy(ParallelStrategy):
    """Data parallelism over several processes. API: ``lightning.fabric.strategies.DDPStrategy``.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: see :class:`ParallelStrategy`.
        process_group_backend: XLA's collectives have no such setting; a notice says so.
        timeout: after which a process that does not come to a collective is reported.
        start_method: ``"popen"``: processes are started from outside. Others are refused.
        **kwargs: of ``DistributedDataParallel``; they tune buckets, of which there are none.
    """

    name = "ddp"
    _backward_sync_control = NothingToSkip()

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        start_method: str = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision)
        refuse_start_method(type(self).__name__, start_method, ("popen",))
        tell_tuning(type(self).__name__, process_group_backend, **kwargs)
        self.timeout_s = (timeout or TIMEOUT).total_seconds()

    def setup_module(self, module: Module) -> Module:
        """The module with process 0's values."""
        if self._model is not None:  # placing it on the mesh does that
            return module
        state = self.broadcast(module.state_dict())
        module.load_state_dict(state)
        return module

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Gradients averaged over processes; those of a Fabric's modules are the global batch's anyway."""
        if self._model is not None:
            super().backward(tensor, module, *args, **kwargs)
            return
        if module is None and jax.process_count() > 1:
            raise MisconfigurationException("DDPStrategy.backward needs the module whose gradients are averaged: pass model=…")
        before = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None} if module else {}
        super().backward(tensor, module, *args, **kwargs)
        if jax.process_count() == 1 or module is None:
            return
        new = {name: p.grad - before.get(name, 0) for name, p in module.named_parameters() if p.grad is not None}
        for name, grad in self.reduce(new).items():
            module.get_parameter(name).grad = grad + before.get(name, 0)

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        # A notebook's processes are forked in stock, which JAX does not survive: here one drives all devices.
        for name, method in {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "popen"}.items():
            description = f"DDP strategy with `start_method={method!r}`"
            strategy_registry.register(name, cls, description=description, override=True, start_method=method)
        strategy_registry.register(
            "ddp_find_unused_parameters_true",
            cls,
            description="Alias for `find_unused_parameters_true` and `start_method='popen'`",
            override=True,
            find_unused_parameters=True,
            start_method="popen",
        )
