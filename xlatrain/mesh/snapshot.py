"""A copy of sharded arrays in host memory: each process keeps what its own devices hold, once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


class HostSnapshot:
    """Copies a pytree of arrays, so that they can be made again after they were donated or changed.

    Exact, on any mesh; nothing is gathered, and no process needs another.
    """

    def __init__(self, tree: Any) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [(leaf.shape, leaf.sharding, _shards(leaf)) for leaf in leaves]

    def restore(self) -> Any:
        """New arrays with the values and shardings of the copied ones."""
        return jax.tree.unflatten(self._structure, [_array(*leaf) for leaf in self._leaves])


def _shards(array: jax.Array) -> dict[Any, np.ndarray]:
    """Part of the array → its values. Copies: on CPU, numpy would show the device's own memory."""
    shards: dict[Any, np.ndarray] = {}
    for shard in array.addressable_shards:
        key = _key(shard.index)
        if key not in shards:
            shards[key] = np.array(shard.data)
    return shards


def _array(shape: tuple[int, ...], sharding: jax.sharding.Sharding, shards: dict[Any, np.ndarray]) -> jax.Array:
    """The global array of ``shape``, made of the values of this process's shards."""
    parts = [
        jax.device_put(shards[_key(index)], device) for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _key(index: tuple[slice, ...] | None) -> tuple[Any, ...]:
    return tuple((part.start, part.stop) for part in index or ())
