"""Ops of ours that captures put into graphs: constraints on where activations lie, transfers between a device and the memory
of its host, the barrier in front of a recomputation, optimizer updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xlatrain.bridge.capture.offloading
import xlatrain.bridge.capture.rematerialization  # noqa: F401  defines the ops
from xlatrain.bridge.capture.activations import MESHES
from xlatrain.bridge.capture.updates import lower_update
from xlatrain.bridge.lower.registry import lowers
from xlatrain.mesh.mesh import SEQUENCE_AXIS, STAGE_AXIS, batch_axes, mesh_here, sequence_parts


@lowers("xlatrain.split_rows.default")
def split_rows(x: jax.Array, mesh: int) -> jax.Array:
    """``x``, dim 0 over the batch axes, dim 1 of three or more over the sequence axis, the others as the partitioner likes."""
    rest: list[Any] = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    parts = sequence_parts(MESHES[mesh])
    if parts > 1 and x.ndim > 2 and x.shape[1] % parts == 0:
        rest[0] = SEQUENCE_AXIS
    spec = PartitionSpec(batch_axes(MESHES[mesh]) or None, *rest)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_here(MESHES[mesh]), spec))


@lowers("xlatrain.split_features.default")
def split_features(x: jax.Array, mesh: int, rows: bool) -> jax.Array:
    """``x``, its last dim over ``fsdp``; where dim 0 is rows of a batch it is split over ``data``, and stages."""
    axes = MESHES[mesh]
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    if rows and spec and (split := _beside_fsdp(axes, x.shape[0])):
        spec[0] = split
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_here(axes), PartitionSpec(*spec, "fsdp")))


@lowers("xlatrain.whole_over_fsdp.default")
def whole_over_fsdp(x: jax.Array, mesh: int) -> jax.Array:
    """``x``, dim 0 over ``data``, and stages, alone where these divide it, dim 1 over the sequence axis: every device of ``fsdp``
    has the same part."""
    axes = MESHES[mesh]
    rest: list[Any] = [None] * (x.ndim - 1)
    if rest and sequence_parts(axes) > 1 and x.shape[1] % sequence_parts(axes) == 0:
        rest[0] = SEQUENCE_AXIS
    spec = PartitionSpec(_beside_fsdp(axes, x.shape[0]) or None, *rest)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_here(axes), spec))


def _beside_fsdp(mesh: Mesh, rows: int) -> tuple[str, ...]:
    """The axes that split rows of a lookup, whose features ``fsdp`` splits; none where they do not divide."""
    axes = tuple(axis for axis in batch_axes(mesh) if axis in ("data", STAGE_AXIS) and mesh.shape[axis] > 1)
    return axes if rows % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()


@lowers("xlatrain.to_host.default")
def to_host(x: jax.Array) -> jax.Array:
    """``x`` in host memory. Only :func:`to_device` can take it. XLA:CPU, whose devices compute in host memory, drops both."""
    return jax.device_put(x, jax.memory.Space.Host)


@lowers("xlatrain.to_device.default")
def to_device(x: jax.Array) -> jax.Array:
    """``x``, of :func:`to_host`, on the device."""
    return jax.device_put(x, jax.memory.Space.Device)


@lowers("xlatrain.barrier.default")
def barrier(x: jax.Array) -> jax.Array:
    """``x``, in a way that XLA does not see through."""
    return lax.optimization_barrier(x)


@lowers("xlatrain.update.default")
def update(params: Sequence[jax.Array], grads: Sequence[jax.Array], call: int, skip: jax.Array | None = None) -> list[Any]:
    return [*lower_update(params, grads, call, skip), jnp.zeros((), jnp.float32)]
