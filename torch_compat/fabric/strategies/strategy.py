"""The base of Fabric's strategies: what a raw training loop asks for. API: ``lightning.fabric.strategies.Strategy`` 2.x."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from torch_compat.checkpoint.checkpoint_dict import raising_damage
from torch_compat.fabric.module_calls import call_on_mesh
from torch_compat.fabric.strategies import on_mesh
from torch_compat.fabric.strategies.states import plain_states, restore_states
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.io.mesh_io import MeshCheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies.hardware import HardwareOfStrategy
from torch_compat.strategies.not_offered import NamesWhatIsNotOffered
from torch_compat.utilities.device_transfer import move_data_to_device
from torch_compat.utilities.overrides import overrides
from xlatrain.bridge.lazy_init import SkippedInitializers

if TYPE_CHECKING:
    from torch_compat.accelerators.accelerator import Accelerator
    from torch_compat.fabric.model import MeshModel
    from torch_compat.strategies.strategy import Strategy as MeshStrategy

TBroadcast = TypeVar("TBroadcast")
TReduce = TypeVar("TReduce")


class _BackwardSyncControl(ABC):
    """A control of the exchange of gradients, which a strategy of the user's may have; under stock's name."""

    @abstractmethod
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """The context of a call and its backward pass, in which the exchange is skipped if ``enabled``."""


class NothingToSkip(_BackwardSyncControl):
    """The control of strategies on a mesh, where gradients are global when they are computed."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Strategy(HardwareOfStrategy, NamesWhatIsNotOffered):
    """Changes how modules, optimizers, data and checkpoints are dealt with in a loop of the user's own.

    Args:
        accelerator: the hardware.
        checkpoint_io: how checkpoints reach storage; None: sharded directories.
        precision: dtypes; None: full precision.

    Attributes:
        mesh_strategy: what makes the mesh: the name of a strategy of the Trainer, or an object of one.
    """

    mesh_strategy: MeshStrategy | str = "auto"
    _backward_sync_control: _BackwardSyncControl | None = None
    _weights_only: bool | None = None

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._checkpoint_io = checkpoint_io
        self._precision = precision
        self._mesh: MeshStrategy | None = None
        self._model: MeshModel | None = None

    # -- the mesh --------------------------------------------------------------------------------------------------

    def take_mesh(self, mesh: MeshStrategy, model: MeshModel) -> None:
        """A Fabric uses this strategy: its mesh, and what it sets up there."""
        self._mesh, self._model = mesh, model

    @property
    def world_size(self) -> int:
        """Devices in the mesh."""
        return 1 if self._mesh is None else self._mesh.world_size

    @property
    def global_rank(self) -> int:
        """Mesh index of this process's first device."""
        return 0 if self._mesh is None else self._mesh.global_rank

    @property
    def node_rank(self) -> int:
        """The index of this process."""
        return 0 if self._mesh is None else self._mesh.node_rank

    # -- plugins ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin by which checkpoints reach storage."""
        if self._checkpoint_io is None:
            self._checkpoint_io = MeshCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def precision(self) -> Precision:
        """Decides the dtypes."""
        if self._precision is None:
            self._precision = Precision()
        return self._precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self._precision = precision

    # -- set-up ----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Set up the hardware, at the beginning of every process, before anything distributed.

        Raises:
            RuntimeError: the strategy has no accelerator.
        """
        if self.accelerator is None:
            raise RuntimeError(f"{type(self).__name__} has no accelerator: it gets one from Fabric, or as an argument")
        self.accelerator.setup_device(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader, wrapped if necessary; what this returns is iterated."""
        return dataloader

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """The context of the creation of tensors: the precision's dtype."""
        return self.precision.tensor_init_context()

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """The context of the creation of a module.

        Args:
            empty_init: True leaves parameters without values, for a checkpoint to be loaded; None: the strategy decides (False).
        """
        stack = contextlib.ExitStack()
        stack.enter_context(self.precision.module_init_context())
        if self._mesh is not None:
            stack.enter_context(on_mesh.init_context(self._mesh, empty_init))
        elif empty_init:
            stack.enter_context(SkippedInitializers())
        return stack

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """The context of the creation of a module whose parameters get their values on their shards."""
        return contextlib.nullcontext() if self._mesh is None else self._mesh.model_sharded_context()

    def setup_module_and_optimizers(self, module: Module, optimizers: list[Optimizer]) -> tuple[Module, list[Optimizer]]:
        """Sets up a module and its optimizers together; they come back in the same order."""
        return self.setup_module(module), [self.setup_optimizer(optimizer) for optimizer in optimizers]

    def setup_module(self, module: Module) -> Module:
        """The module, wrapped if necessary."""
        return module

    def add_copy(self, module: Module) -> None:
        """Take up a copy of a module that was set up."""
        if self._model is not None:
            self._model.add_module(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer, wrapped if necessary."""
        return optimizer

    @abstractmethod
    def module_to_device(self, module: Module) -> None:
        """Moves the module to its device."""

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """The batch with its tensors on ``device`` (the root device), of the same type."""
        return move_data_to_device(batch, device or self.root_device)

    # -- steps -----------------------------------------------------------------------------------------------------

    def call_module(self, module: Module, method: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a set-up module: ``run(*args, **kwargs)``, as a program on the mesh.

        Args:
            module: whose parameters it uses.
            method: its name.
        """
        model = self._model
        if model is None or model.on_host or model.tracer is not None:
            return run(*args, **kwargs)
        return call_on_mesh(model, module, method, run, args, kwargs)

    @property
    def runs_beside_programs(self) -> bool:
        """Whether what is called now runs on one process beside several devices, in no captured step."""
        return self.world_size > 1 and (self._model is None or self._model.tracer is None)

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Gradients of ``tensor``; on ``p.grad`` afterwards, the same on every process."""
        precision = self.precision
        if overrides(precision, "pre_backward"):
            precision.pre_backward(tensor, module)
        if overrides(precision, "backward"):
            precision.backward(tensor, module, *args, **kwargs)
        else:
            tensor.backward(*args, **kwargs)
        if overrides(precision, "post_backward"):
            precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step the optimizer."""
        return optimizer.step(**kwargs) if self._model is None else on_mesh.optimizer_step(self._model, optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scales the optimizer's gradients to a norm of at most ``max_norm``; gives their norm before, a 0-d tensor.

        Raises:
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        """
        parameters = self._unscaled(optimizer)
        if self._model is not None:
            return on_mesh.clip_norm(self._model, parameters, max_norm, norm_type, error_if_nonfinite)
        return torch.nn.utils.clip_grad_norm_(
            parameters, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clips each gradient to ``[-clip_val, clip_val]``."""
        parameters = self._unscaled(optimizer)
        if self._model is not None:
            on_mesh.clip_value(self._model, parameters, clip_val)
        else:
            torch.nn.utils.clip_grad_value_(parameters, clip_value=clip_val)

    def _unscaled(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters whose gradients are clipped, once the precision plugin has unscaled them."""
        if overrides(self.precision, "unscale_gradients"):
            self.precision.unscale_gradients(optimizer)
        return list(self.precision.main_params(optimizer))

    # -- collectives -----------------------------------------------------------------------------------------------

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``tensor`` of every process, stacked."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """``tensor`` reduced over processes."""

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Waits until every process is here."""

    @abstractmethod
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of process ``src``, on every process."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce a decision: True if every process (``all``), or any process, says True."""
        return decision

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Module | Optimizer | Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Writes modules, optimizers and other state; every process calls it; returns when committed.

        Args:
            path: where to.
            state: of modules, optimizers and all else that has ``load_state_dict``, the ``state_dict()`` is saved.
            storage_options: for the ``CheckpointIO``.
            filter: key of ``state`` → ``(name, value) -> bool``, whether that entry of its state dict is saved.
        """
        plain = plain_states(state, self.get_module_state_dict, self.get_optimizer_state, filter or {})
        if self.checkpoint_io.collective or self.is_global_zero:
            self.checkpoint_io.save_checkpoint(plain, path, storage_options=storage_options)
        self.barrier(f"saved {path}")

    def get_module_state_dict(self, module: Module) -> dict[str, Any | Tensor]:
        """The module's ``state_dict()``; values on the mesh are read when they are used."""
        return module.state_dict() if self._model is None else on_mesh.module_state(module)

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any | Tensor], strict: bool = True) -> None:
        """Loads a state dict into the module; one error lists every difference."""
        with raising_damage():
            module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's ``state_dict()``; on the mesh it is read when it is used, before the next step."""
        return optimizer.state_dict() if self._model is None else self._model.optimizer_state(optimizer)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Give the optimizer a state."""
        if self._model is None:
            optimizer.load_state_dict(state)
        else:
            self._model.load_optimizer_state(optimizer, state)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Module | Optimizer | dict[str, Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Reads a checkpoint, into ``state`` in place where it is given.

        Args:
            path: what :meth:`save_checkpoint` was given.
            state: a dict of what is to be restored; a module or optimizer, if the checkpoint is its state dict; None: nothing.
            strict: whether every key of ``state`` must be in the checkpoint, and the names of modules must match exactly.
            weights_only: False unpickles: only for checkpoints that you trust. None: as Fabric's call says.

        Returns:
            What was not restored; without ``state`` the whole checkpoint.

        Raises:
            KeyError: lists the keys that the checkpoint does not have.
        """
        self.barrier(f"load {path}")
        weights_only = self._weights_only if weights_only is None else weights_only
        trusted = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint = self.checkpoint_io.load_checkpoint(path, **trusted)
        return restore_states(checkpoint, state, self.load_module_state_dict, strict, self.load_optimizer_state_dict)

    @contextlib.contextmanager
    def reading(self, weights_only: bool | None) -> Iterator[None]:
        """Checkpoints that are loaded inside are unpickled if ``weights_only`` is False."""
        self._weights_only = weights_only
        try:
            yield
        finally:
            self._weights_only = None

    def teardown(self) -> None:
        """The end: waits for saves, then lets go."""
        self.precision.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
