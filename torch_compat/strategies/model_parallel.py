"""Parallelism that the user's ``configure_model`` asks torch for: its statements become sharding rules."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch

from torch_compat.plugins.io.torch_io import TorchCheckpointIO
from torch_compat.strategies.ddp import TIMEOUT, tell_tuning
from torch_compat.strategies.parallel import ParallelStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.overrides import overrides
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch_compat.utilities.registry import StrategyRegistryType
from xlatrain.bridge.parallelize import DATA, TENSOR, MeshView, Parallelized
from xlatrain.mesh.sharding import ShardingRules

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

Size = int | Literal["auto"]


class ModelParallelStrategy(ParallelStrategy):
    """A mesh whose sharding ``configure_model`` decides. API: ``lightning.pytorch.strategies.ModelParallelStrategy``.

    ``configure_model`` calls torch's ``parallelize_module(…, self.device_mesh["tensor_parallel"], plan)`` and ``fully_shard(…,
    mesh=self.device_mesh["data_parallel"])``. These calls are recorded and decide where parameters lie: a plan's styles what
    ``tensor`` splits, fully sharded modules what ``fsdp`` splits; everything else is whole on every device. Modules stay what
    they are and see whole tensors, whatever layouts are asked for (as with ``use_local_output=False``): numbers are those of one
    device. Integers of modules that ``configure_model`` divides by the tensor-parallel size (heads) are therefore put back, with
    a notice.

    Args:
        data_parallel_size: devices that split the batch; ``"auto"``: the number of processes.
        tensor_parallel_size: devices that split a tensor; ``"auto"``: the devices of a process.
        save_distributed_checkpoint: False: one file with whole tensors, which stock Lightning reads, instead of shards.
        timeout: after which a process that does not come to a collective of host code is reported.
    """

    strategy_name = "model_parallel"

    def __init__(
        self,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
    ) -> None:
        super().__init__(checkpoint_io=None if save_distributed_checkpoint else TorchCheckpointIO())
        self.rules = ShardingRules(min_size=1)
        self.timeout_s = (timeout or TIMEOUT).total_seconds()
        tell_tuning(type(self).__name__, process_group_backend)
        self._data_parallel_size = data_parallel_size
        self._tensor_parallel_size = tensor_parallel_size
        self._parallelized: Parallelized | None = None

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        data = _size(self._data_parallel_size, n_processes)
        tensor = _size(self._tensor_parallel_size, n_devices // n_processes)
        if data * tensor != n_devices:
            raise MisconfigurationException(
                f"{type(self).__name__}: data_parallel_size={data} × tensor_parallel_size={tensor} is not the number of devices, "
                f"{n_devices}"
            )
        return {"fsdp": data, "tensor": tensor}

    @property
    def device_mesh(self) -> MeshView:
        """The device mesh as ``configure_model`` gets it: dims ``data_parallel`` and ``tensor_parallel``."""
        return MeshView({DATA: self.mesh.shape["fsdp"], TENSOR: self.mesh.shape["tensor"]})

    def connect(self, model: LightningModule) -> None:
        if model is not self.lightning_module:
            self._parallelized = None
        super().connect(model)

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = self.device_mesh  # pyright: ignore[reportAttributeAccessIssue]

    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        if not overrides(self.lightning_module, "configure_model"):
            raise TypeError(
                f"{type(self).__name__} needs configure_model() in the LightningModule: parallelize_module and fully_shard are "
                "called there"
            )
        super().setup(trainer)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Record the calls of torch's ``parallelize_module`` and ``fully_shard`` inside; otherwise as in other strategies."""
        with self.parallelizing(self.lightning_module):
            yield

    @contextlib.contextmanager
    def parallelizing(self, module: torch.nn.Module | None) -> Generator[None, None, None]:
        """The context of the code that parallelizes ``module``; parameters on torch's meta device get their values at its end."""
        if self._parallelized is None:
            self._parallelized = Parallelized(self.device_mesh)
        with super().model_sharded_context():
            with self._parallelized.recording():
                yield
            if module is not None:
                initialize_meta(module)
        if told := self._parallelized.restore_divided():
            rank_zero_info(f"{type(self).__name__}: modules see whole tensors here: {'; '.join(told)}")

    def sharding_rules(self, module: torch.nn.Module) -> ShardingRules:
        if self._parallelized is None:
            return self.rules
        return replace(self.rules, planned=self._parallelized.splits(module))

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        """Register nothing: as in stock Lightning the strategy has no name, since the user must say which sizes it needs."""


def _size(wanted: int | str, automatic: int) -> int:
    return wanted if isinstance(wanted, int) else automatic


def initialize_meta(module: torch.nn.Module) -> None:
    """Give parameters on torch's meta device memory and the values of their module's ``reset_parameters()``."""
    missed = []
    for path, owner in module.named_modules():
        own = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        owner.to_empty(device="cpu", recurse=False)
        if callable(reset := getattr(owner, "reset_parameters", None)):
            reset()
        else:
            missed.append(f"{path or 'the root'} ({type(owner).__name__})")
    if missed:
        rank_zero_warn(
            f"Modules on the meta device have no reset_parameters(), so their parameters have no values yet: "
            f"{', '.join(missed)}. Give them values in configure_model(), or load a checkpoint"
        )
