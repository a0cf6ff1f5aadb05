"""Parallelism that the user's function asks torch for: its statements become sharding rules."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

from torch_compat.fabric.strategies.data_parallel import DDPStrategy
from torch_compat.strategies.ddp import TIMEOUT
from torch_compat.strategies.model_parallel import ModelParallelStrategy as TrainerModelParallelStrategy
from torch_compat.strategies.model_parallel import Size
from xlatrain.bridge.parallelize import MeshView

TModel = TypeVar("TModel", bound=Module)


class ModelParallelStrategy(DDPStrategy):
    """``parallelize_fn`` calls torch's ``parallelize_module`` and ``fully_shard``. API:
    ``lightning.fabric.strategies.ModelParallelStrategy``.

    What its calls mean here is said in :class:`torch_compat.strategies.ModelParallelStrategy`, the Trainer's.

    Args:
        parallelize_fn: ``(module, device_mesh) -> module``, called by ``fabric.setup_module``; must return the module that
            it got.
        data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout: as there.
    """

    name = "model_parallel"

    def __init__(
        self,
        parallelize_fn: Callable[[Any, Any], Any],
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
    ) -> None:
        mesh = TrainerModelParallelStrategy(
            data_parallel_size, tensor_parallel_size, save_distributed_checkpoint, process_group_backend, timeout
        )
        super().__init__(checkpoint_io=None if save_distributed_checkpoint else mesh.checkpoint_io, timeout=timeout)
        self.mesh_strategy = self._parallel = mesh
        self._parallelize_fn = parallelize_fn

    @property
    def device_mesh(self) -> MeshView:
        """The device mesh that ``parallelize_fn`` gets."""
        return self._parallel.device_mesh

    def module_to_device(self, module: Module) -> None:
        """Do nothing: a module on torch's meta device gets its values in :meth:`setup_module`."""

    def setup_module(self, module: Module) -> Module:
        """Calls ``parallelize_fn``.

        Raises:
            TypeError: it returned something else than the module.
        """
        with self._parallel.parallelizing(module):
            found = self._parallelize_fn(module, self.device_mesh)
        if found is not module:
            raise TypeError(
                f"ModelParallelStrategy: parallelize_fn must return the module that it is given, but returned "
                f"{type(found).__name__} for {type(module).__name__}; wrappers are not supported"
            )
        return module

    def setup_module_and_optimizers(self, module: Module, optimizers: list[Optimizer]) -> NoReturn:
        raise NotImplementedError(
            "ModelParallelStrategy sets up the module first, because its parameters may be made there: model = "
            "fabric.setup_module(model), then the optimizer of model.parameters(), then fabric.setup_optimizers(optimizer)"
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing: this strategy has no name, since it needs a function."""
