"""Conversions between host arrays, torch tensors and arrays on a mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from xlatrain.bridge.tensors.host import from_numpy
from xlatrain.cluster import distributed


def place(host: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array, the same on every process, as a global array of its shape and dtype on the devices of ``sharding``.

    No process needs the others.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def host_value(array: jax.Array, name: str = "") -> np.ndarray:
    """The whole array on this host. Where this process has only a part of it, all processes must call this together.

    Args:
        array: of any sharding.
        name: what it is, for whoever waits for a process that does not call.

    Raises:
        TimeoutError: a process did not come. (The watch sees much sooner if it waits somewhere else.)
    """
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    if (whole := _of_local_shards(array)) is not None:
        return whole
    # A program over all devices, with some processes not in it, would wait for ever and name nobody.
    distributed.barrier(f"reading {name or f'an array of shape {list(array.shape)}'}, whose shards span processes")
    # without compiler_options: one gather
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(array.sharding.mesh, PartitionSpec()))(array)  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(gathered.addressable_data(0))


def is_here(array: jax.Array) -> bool:
    """Whether this process's devices have all of the array, so that :func:`host_value` needs no other process."""
    sharding = array.sharding
    if sharding.is_fully_addressable or sharding.is_fully_replicated:
        return True
    parts = {str(index) for index in sharding.addressable_devices_indices_map(array.shape).values()}
    return len(parts) * math.prod(sharding.shard_shape(array.shape)) >= array.size


def _of_local_shards(array: jax.Array) -> np.ndarray | None:
    """The whole array, where this process's devices have all of it, as where it is split within hosts only; else None."""
    if not is_here(array):
        return None
    parts = {str(shard.index): shard for shard in array.addressable_shards}.values()
    whole = np.empty(array.shape, array.dtype)
    for shard in parts:
        whole[shard.index] = np.asarray(shard.data)
    return whole


def to_torch(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole array as an ordinary CPU tensor of its own memory, of ``dtype`` or its own."""
    host = host_value(array) if isinstance(array, jax.Array) else np.asarray(array)
    tensor = from_numpy(np.array(host))
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)
