"""Optimizer state on its way from the host to the mesh and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from torch_compat.functional.host_arrays import host_value, place
from xlatrain.optimizers.rule import State
from xlatrain.optimizers.shardings import leaf_sharding, state_shardings


def place_state(values: np.ndarray, param: jax.Array, dtype: np.typing.DTypeLike) -> jax.Array:
    """``values``, the same on every process, as a global array of ``dtype`` placed as state of ``param``."""
    host = np.array(values, dtype)  # a copy: JAX may keep the buffer, which torch goes on writing to
    return place(host, leaf_sharding(param.sharding, param.shape, host.shape))


def make_state(init: Callable[[Mapping[str, jax.Array]], dict[str, State]], params: Mapping[str, jax.Array]) -> dict[str, State]:
    """``init(params)`` computed in one program, each array born on the devices of its parameter."""
    if not params:
        return {}
    shardings = state_shardings(jax.eval_shape(init, params), params)
    return jax.jit(init, out_shardings=shardings)(params)


def state_on_host(state: Any) -> Any:
    """Every array of a pytree as numpy. Collective where an array spans processes: all of them must call it."""
    return jax.tree.map(host_value, state)
