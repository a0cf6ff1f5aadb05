"""Constraints on where activations lie."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.bridge.activations import MESHES
from xlatrain.bridge.registry import lowers
from xlatrain.mesh import batch_axes


@lowers("xlatrain.split_rows.default")
def split_rows(x: jax.Array, mesh: int) -> jax.Array:
    """``x``, dim 0 over the batch axes, the others as the partitioner likes."""
    spec = PartitionSpec(batch_axes(MESHES[mesh]), *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESHES[mesh], spec))
