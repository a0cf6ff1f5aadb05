"""Ops of ours that captures put into graphs: constraints on where activations lie, transfers between a device and the memory
of its host, the barrier in front of a recomputation, optimizer updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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
from xlatrain.mesh.mesh import SEQUENCE_AXIS, batch_axes, mesh_here, sequence_parts, shard_map_here


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
def split_features(x: jax.Array, mesh: int) -> jax.Array:
    """``x``, its last dim over ``fsdp``."""
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1), "fsdp")
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_here(MESHES[mesh]), spec))


@lowers("xlatrain.whole_over_fsdp.default")
def whole_over_fsdp(x: jax.Array, mesh: int) -> jax.Array:
    """Ids to look up, those of all devices of ``fsdp`` on each of these; their rows in the order of :func:`features_of_rows`."""
    lookup = _Lookup.of(MESHES[mesh], x.shape)
    own, given = lookup.place(lookup.rows, x.ndim), lookup.place(lookup.beside, x.ndim)
    if not lookup.exchanged:
        return lax.with_sharding_constraint(x, NamedSharding(mesh_here(MESHES[mesh]), given))
    return shard_map_here(partial(lax.all_gather, axis_name="fsdp", tiled=True), MESHES[mesh], (own,), given)(x)


@lowers("xlatrain.rows_of_features.default")
def rows_of_features(x: jax.Array, mesh: int) -> jax.Array:
    """Exchange what was looked up: some features of the rows of all devices of ``fsdp`` for all features of a device's rows."""
    return _exchanged(x, mesh, to_rows=True)


@lowers("xlatrain.features_of_rows.default")
def features_of_rows(x: jax.Array, mesh: int) -> jax.Array:
    """The inverse of :func:`rows_of_features`. Its rows are those of the devices of ``fsdp``, one after the other, on each of the
    other axes' devices: in another order than the batch's where an axis of the batch comes behind ``fsdp``."""
    return _exchanged(x, mesh, to_rows=False)


def _exchanged(x: jax.Array, mesh: int, to_rows: bool) -> jax.Array:
    lookup = _Lookup.of(MESHES[mesh], x.shape[:-1])
    rows, features = lookup.place(lookup.rows, x.ndim), lookup.place(lookup.beside, x.ndim, "fsdp")
    if not lookup.exchanged:
        return lax.with_sharding_constraint(x, NamedSharding(mesh_here(MESHES[mesh]), features))
    split, concat, specs = (0, x.ndim - 1, (features, rows)) if to_rows else (x.ndim - 1, 0, (rows, features))
    exchange = partial(lax.all_to_all, axis_name="fsdp", split_axis=split, concat_axis=concat, tiled=True)
    return shard_map_here(exchange, MESHES[mesh], specs[:1], specs[1])(x)


@dataclass(frozen=True)
class _Lookup:
    """The places of ids, and of what is looked up, on a mesh whose ``fsdp`` splits a table's features.

    Attributes:
        exchanged: whether all axes of the batch divide dim 0; else ``fsdp`` does not split it.
        rows: the axes that split it in the end.
        beside: those that split it while ``fsdp`` splits features.
        sequence: the axis that splits dim 1; None: none.
    """

    exchanged: bool
    rows: tuple[str, ...]
    beside: tuple[str, ...]
    sequence: str | None

    @classmethod
    def of(cls, mesh: Mesh, shape: tuple[int, ...]) -> _Lookup:
        """The places of ids of a shape."""
        rows = tuple(axis for axis in batch_axes(mesh) if mesh.shape[axis] > 1)
        beside = tuple(axis for axis in rows if axis != "fsdp")
        exchanged, divided = (
            bool(shape) and shape[0] % math.prod(mesh.shape[axis] for axis in axes) == 0 for axes in (rows, beside)
        )
        parts = sequence_parts(mesh)
        sequence = SEQUENCE_AXIS if parts > 1 and len(shape) > 1 and shape[1] % parts == 0 else None
        return cls(exchanged, rows, beside if divided else (), sequence)

    def place(self, rows: tuple[str, ...], ndim: int, features: str | None = None) -> PartitionSpec:
        """The spec of an array of so many dims whose dim 0 ``rows`` split, and whose last one ``features``."""
        dims: list[Any] = [rows or None, self.sequence, *[None] * ndim][: ndim if features is None else ndim - 1]
        return PartitionSpec(*dims, *([] if features is None else [features]))


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
