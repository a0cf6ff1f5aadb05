"""Fabric's data parallelism: every process computes its rows, gradients are averaged over processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import jax
import torch
from torch import Tensor
from torch.nn import Module

from torch_compat.fabric.strategies.strategy import Strategy
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies.collectives import ProcessCollectives
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.registry import StrategyRegistryType


class SingleDeviceStrategy(ProcessCollectives, Strategy):
    """One process with plain torch on its host. API: ``lightning.fabric.strategies.SingleDeviceStrategy``."""

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

    @property
    def is_global_zero(self) -> bool:
        return jax.process_index() == 0

    def module_to_device(self, module: Module) -> None:
        module.to(self.root_device)

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        strategy_registry.register(cls.name, cls, description=cls.__name__, override=True)


class DDPStrategy(SingleDeviceStrategy):
    """Several processes. API: ``lightning.fabric.strategies.DDPStrategy``.

    Args:
        accelerator: the hardware.
        checkpoint_io: how checkpoints reach storage.
        precision: dtypes.
        timeout: after which a process that does not come to a collective is reported.
    """

    name = "ddp"

    def __init__(
        self,
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision)
        if timeout is not None:
            self.timeout_s = timeout.total_seconds()

    def setup_module(self, module: Module) -> Module:
        """The module with process 0's values."""
        if self._model is not None:  # placing it on the mesh does that
            return module
        state = self.broadcast(module.state_dict())
        module.load_state_dict(state)
        return module

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Gradients averaged over processes; those of a module on the mesh are the global batch's anyway."""
        if self._model is not None and not self._model.on_host:
            tensor.backward(*args, **kwargs)
            return
        if module is None and jax.process_count() > 1:
            raise MisconfigurationException("DDPStrategy.backward needs the module whose gradients are averaged: pass model=…")
        before = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None} if module else {}
        tensor.backward(*args, **kwargs)
        if jax.process_count() == 1 or module is None:
            return
        new = {name: p.grad - before.get(name, 0) for name, p in module.named_parameters() if p.grad is not None}
        for name, grad in self.reduce(new).items():
            module.get_parameter(name).grad = grad + before.get(name, 0)
