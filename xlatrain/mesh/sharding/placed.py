"""Shardings of everything but parameters: batches, scalars, optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import batch_axes


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """Dim 0 split over the mesh's data axes."""
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh) or None))


def like_parameters(state: Any, params: Mapping[str, Any], shardings: Mapping[str, NamedSharding], mesh: Mesh) -> Any:
    """Shardings for per-parameter state (``{parameter path: any pytree}``): a leaf shaped like its parameter is split
    like it, every other leaf is replicated."""

    def of_parameter(path: str, sub: Any) -> Any:
        shape = tuple(params[path].shape)
        same = shardings[path]
        return jax.tree.map(lambda leaf: same if tuple(leaf.shape) == shape else replicated(mesh), sub)

    return {path: of_parameter(path, sub) for path, sub in state.items()}
