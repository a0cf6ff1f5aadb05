"""The mesh's own checkpoints: every process writes its shards."""

from __future__ import annotations

from typing import ClassVar

from torch_compat.plugins.io.mesh_io import MeshCheckpointIO


class ShardedCheckpointIO(MeshCheckpointIO):
    """Checkpoint directories of :mod:`xlatrain.checkpoint` in every run, also where no parameter is split over devices."""

    _directory: ClassVar[bool | None] = True
