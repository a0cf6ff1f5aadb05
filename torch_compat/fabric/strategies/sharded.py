"""Fabric's strategies with parameters that are split over the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_compat.fabric.strategies.data_parallel import DDPStrategy
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies import FSDPStrategy as TrainerFSDPStrategy
from torch_compat.strategies import MeshStrategy as TrainerMeshStrategy


class FSDPStrategy(DDPStrategy):
    """Parameters, gradients and optimizer state split over all devices. API: ``lightning.fabric.strategies.FSDPStrategy``.

    Args:
        accelerator, checkpoint_io, precision: plugins.
        **options: of the Trainer's :class:`~torch_compat.strategies.FSDPStrategy` (``sharding_strategy``, ``device_mesh``, …).
    """

    name = "fsdp"

    def __init__(
        self,
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        **options: Any,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision, options.get("timeout"))
        self.mesh_strategy = TrainerFSDPStrategy(**options)


class MeshStrategy(DDPStrategy):
    """Any mesh. Not in stock Lightning.

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
        super().__init__(accelerator, checkpoint_io, precision)
        self.mesh_strategy = TrainerMeshStrategy(axes, **options)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """A mesh has no name of its own."""
