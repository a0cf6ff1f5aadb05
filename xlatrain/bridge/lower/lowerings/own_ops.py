"""Constraints on where activations lie."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.bridge.capture.activations import MESHES
from xlatrain.bridge.lower.registry import lowers
from xlatrain.mesh.mesh import batch_axes


@lowers("xlatrain.split_rows.default")
def split_rows(x: jax.Array, mesh: int) -> jax.Array:
    """``x``, dim 0 over the batch axes, the others as the partitioner likes."""
    spec = PartitionSpec(batch_axes(MESHES[mesh]), *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESHES[mesh], spec))


@lowers("xlatrain.split_features.default")
def split_features(x: jax.Array, mesh: int, rows: bool) -> jax.Array:
    """``x``, its last dim over ``fsdp``; where dim 0 is rows of a batch it is split over ``data``."""
    axes = MESHES[mesh]
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    if rows and spec and axes.shape.get("data", 1) > 1 and x.shape[0] % axes.shape["data"] == 0:
        spec[0] = "data"
    return jax.lax.with_sharding_constraint(x, NamedSharding(axes, PartitionSpec(*spec, "fsdp")))


@lowers("xlatrain.whole_over_fsdp.default")
def whole_over_fsdp(x: jax.Array, mesh: int) -> jax.Array:
    """``x``, dim 0 over ``data`` alone where that divides it: every device of ``fsdp`` has the same part."""
    axes = MESHES[mesh]
    size = axes.shape.get("data", 1)
    spec = PartitionSpec("data" if size > 1 and x.shape[0] % size == 0 else None, *[None] * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, NamedSharding(axes, spec))
