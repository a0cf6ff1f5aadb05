"""Training type plugins of 1.3 to 1.5, each over the strategy of today that does its work. API:
``pytorch_lightning.plugins.training_type``.
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from torch_compat.legacy.training_type_plugin import Plugin, TrainingTypePlugin
from torch_compat.strategies.ddp import refuse, tell_tuning
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_collectives import ProcessCollectives
from torch_compat.utilities.registry import StrategyRegistryType
from xlatrain.mesh.sharding import ShardingRules


class MeshPlugin(ProcessCollectives, TrainingTypePlugin):
    """A training type plugin with nothing left abstract: every device of every process in one mesh."""

    @property
    def on_gpu(self) -> bool:
        """Whether the mesh is made of GPUs."""
        return self._platform == "gpu"

    @property
    def on_tpu(self) -> bool:
        """Whether the mesh is made of TPUs."""
        return self._platform == "tpu"

    @property
    def _platform(self) -> str:
        return "cpu" if self._strategy is None else self._strategy.mesh.devices.flat[0].platform

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    def model_to_device(self) -> None:
        """Parameters go to the mesh by rule."""

    @property
    def is_global_zero(self) -> bool:
        return jax.process_index() == 0

    def reduce_boolean_decision(self, decision: bool) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reduce a decision: True if every process says True."""
        return ProcessCollectives.reduce_boolean_decision(self, decision)

    def teardown(self) -> None:
        """The mesh's memory is released by the run."""


class SingleDevicePlugin(MeshPlugin):
    """Training on one device.

    Args:
        device: its torch name.
    """

    def __init__(self, device: Any = "cpu", checkpoint_io: Any = None) -> None:
        super().__init__()
        torch.device(device)  # an invalid name raises here
        self.checkpoint_io = checkpoint_io

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        if n_devices != 1:
            raise MisconfigurationException(f"SingleDevicePlugin with {n_devices} devices; set devices=1 or use DDPPlugin")
        return {"data": 1}


class ParallelPlugin(MeshPlugin):
    """Training on several devices.

    Args:
        parallel_devices: which of them the Trainer's ``devices`` say; not given here.
        cluster_environment: which world the processes join.
        checkpoint_io: how checkpoints reach storage.
    """

    def __init__(self, parallel_devices: Any = None, cluster_environment: Any = None, checkpoint_io: Any = None) -> None:
        super().__init__()
        if parallel_devices is not None:
            raise MisconfigurationException(
                f"{type(self).__name__}(parallel_devices=…): choose devices with Trainer(accelerator=…, devices=…)"
            )
        self.cluster_environment = cluster_environment
        self.checkpoint_io = checkpoint_io

    @property
    def world_size(self) -> int:
        """Devices in the mesh."""
        return self._attached().world_size

    @property
    def global_rank(self) -> int:
        """Mesh index of this process's first device."""
        return self._attached().global_rank

    @property
    def local_rank(self) -> int:
        """Always 0: one process drives all devices of its host."""
        return 0

    @property
    def node_rank(self) -> int:
        """The index of this process."""
        return jax.process_index()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments for samplers that users make themselves."""
        return self._attached().distributed_sampler_kwargs


class DDPPlugin(ParallelPlugin):
    """Data parallelism: the batch is split over all devices, parameters are whole on each.

    Args:
        parallel_devices, cluster_environment, checkpoint_io: see :class:`ParallelPlugin`.
        num_nodes: 1 or None; the Trainer's argument says it.
        sync_batchnorm: 1.5's argument; BatchNorm always sees the global batch.
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper, model_averaging_period: refused.
        **kwargs: of ``DistributedDataParallel``; they tune buckets, of which there are none.
    """

    distributed_backend = "ddp"

    def __init__(
        self,
        parallel_devices: Any = None,
        num_nodes: int | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        sync_batchnorm: bool | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Any = None,
        ddp_comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(parallel_devices, cluster_environment, checkpoint_io)
        name = type(self).__name__
        refuse(
            name,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
        )
        if num_nodes not in (None, 1):
            raise MisconfigurationException(f"{name}(num_nodes={num_nodes}): use Trainer(num_nodes={num_nodes})")
        tell_tuning(name, None, **kwargs)

    @classmethod
    def register_plugins(cls, plugin_registry: StrategyRegistryType) -> None:
        plugin_registry.register(f"{cls.distributed_backend}_plugin", cls, description=cls.__name__, override=True)


class DDPShardedPlugin(DDPPlugin):
    """Parameters, gradients and optimizer state are split over the devices (FairScale's part is XLA's here)."""

    distributed_backend = "ddp_sharded"
    rules = ShardingRules(min_size=1)

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        return {"data": 1, "fsdp": n_devices}


class DDPFullyShardedPlugin(DDPShardedPlugin):
    """A :class:`DDPShardedPlugin` under another name."""

    distributed_backend = "fsdp"


class TPUSpawnPlugin(DDPPlugin):
    """The TPU chips of every host in one mesh; JAX drives them from one process per host, so nothing is spawned."""

    distributed_backend = "tpu_spawn"


class SingleTPUPlugin(SingleDevicePlugin):
    """Training on one TPU chip."""


__all__ = [
    "DDPFullyShardedPlugin",
    "DDPPlugin",
    "DDPShardedPlugin",
    "ParallelPlugin",
    "Plugin",
    "SingleDevicePlugin",
    "SingleTPUPlugin",
    "TPUSpawnPlugin",
    "TrainingTypePlugin",
]
