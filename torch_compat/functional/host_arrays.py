"""Between host arrays, torch tensors and arrays on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from xlatrain.bridge.host import from_numpy


def place(host: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array, the same on every process, onto the devices of ``sharding``; no process needs the others."""
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def host_value(array: jax.Array) -> np.ndarray:
    """The whole array on this host. Where its shards span processes, all processes must call this together."""
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    gathered = jax.jit(lambda x: x, out_shardings=NamedSharding(array.sharding.mesh, PartitionSpec()))(array)  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(gathered.addressable_data(0))


def to_torch(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole array as an ordinary CPU tensor of its own memory, of ``dtype`` or its own."""
    host = host_value(array) if isinstance(array, jax.Array) else np.asarray(array)
    tensor = from_numpy(np.array(host))
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)
