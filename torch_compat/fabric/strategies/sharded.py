"""Fabric's strategies with parameters that are split over the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch

from torch_compat.fabric.strategies.data_parallel import DDPStrategy
from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.io.torch_io import TorchCheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies import FSDPStrategy as TrainerFSDPStrategy
from torch_compat.strategies import MeshStrategy as TrainerMeshStrategy
from torch_compat.strategies.ddp import TIMEOUT
from torch_compat.strategies.fsdp import register_fsdp


class FSDPStrategy(DDPStrategy):
    """Parameters, gradients and optimizer state split over all devices. API: ``lightning.fabric.strategies.FSDPStrategy``.

    Args:
        accelerator, parallel_devices, cluster_environment, precision: see
            :class:`~torch_compat.fabric.strategies.ParallelStrategy`.
        state_dict_type: ``"full"`` saves one file with whole tensors, which stock reads; ``"sharded"`` saves shards.
        checkpoint_io: instead of what ``state_dict_type`` says. Stock has no such argument.
        process_group_backend, timeout, cpu_offload, mixed_precision, auto_wrap_policy, activation_checkpointing,
            activation_checkpointing_policy, sharding_strategy, device_mesh, **kwargs: as of the Trainer's
            :class:`~torch_compat.strategies.FSDPStrategy`.
    """

    name = "fsdp"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "sharded",
        device_mesh: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        **kwargs: Any,
    ) -> None:
        self.mesh_strategy = TrainerFSDPStrategy(
            process_group_backend=process_group_backend,
            timeout=timeout,
            cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing=activation_checkpointing,
            activation_checkpointing_policy=activation_checkpointing_policy,
            sharding_strategy=sharding_strategy,
            state_dict_type=state_dict_type,
            device_mesh=device_mesh,
            **kwargs,
        )
        if checkpoint_io is None and state_dict_type == "full":
            checkpoint_io = TorchCheckpointIO()
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, timeout=timeout)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        register_fsdp(strategy_registry, cls)


class MeshStrategy(DDPStrategy):
    """A strategy for any mesh. Not in stock Lightning.

    Args:
        axes: axis name → size, as of the Trainer's :class:`~torch_compat.strategies.MeshStrategy`.
        accelerator, checkpoint_io, precision: plugins.
        **options: of that class.
    """

    name = "mesh"

    def __init__(
        self,
        axes: Mapping[str, int],
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        **options: Any,
    ) -> None:
        super().__init__(accelerator, checkpoint_io=checkpoint_io, precision=precision)
        self.mesh_strategy = TrainerMeshStrategy(axes, **options)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """A mesh has no name of its own."""
