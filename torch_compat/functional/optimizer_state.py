"""Optimizer state between torch tensors on the host and arrays on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils

from xlatrain.bridge.dtypes import torch_dtype
from xlatrain.bridge.live import from_numpy
from xlatrain.optimizers.rule import State
from xlatrain.optimizers.shardings import leaf_sharding, state_shardings


def place(values: np.ndarray, param: jax.Array, dtype: np.typing.DTypeLike) -> jax.Array:
    """``values``, the same on every process, as a global array of ``dtype`` placed as state of ``param``."""
    host = np.array(values, dtype)  # a copy: JAX may keep the buffer, which torch goes on writing to
    sharding = leaf_sharding(param.sharding, param.shape, host.shape)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def make_placed(init: Callable[[Mapping[str, jax.Array]], dict[str, State]], params: Mapping[str, jax.Array]) -> dict[str, State]:
    """``init(params)`` computed in one program, each array born on the devices of its parameter."""
    if not params:
        return {}
    shardings = state_shardings(jax.eval_shape(init, params), params)
    return jax.jit(init, out_shardings=shardings)(params)


def to_host(tree: Any) -> Any:
    """Every array of a pytree as numpy. Collective where an array spans processes: all of them must call it."""

    def whole(array: jax.Array) -> Any:
        if array.is_fully_addressable or array.is_fully_replicated:
            return array
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


def to_tensor(values: np.ndarray, dtype: torch.dtype | None) -> torch.Tensor:
    """A host tensor of its own with ``values``, in ``dtype`` or else in the dtype that ``values`` has."""
    return from_numpy(np.array(values)).to(dtype or torch_dtype(values.dtype))
