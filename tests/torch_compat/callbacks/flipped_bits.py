"""A bit of an array that is flipped on one device."""

from __future__ import annotations

import jax
import numpy as np


def flipped(array: jax.Array, device: int, bit: int = 12) -> jax.Array:
    """``array``, of which the device with this id holds one bit otherwise; on every process of the mesh."""
    parts = []
    for shard in array.addressable_shards:
        part = np.array(shard.data)
        if shard.device.id == device:
            flat = part.reshape(-1).view(np.uint8)
            flat[bit // 8] ^= 1 << bit % 8
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
