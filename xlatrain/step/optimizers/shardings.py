"""Shardings of optimizer state: split like the parameter that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def leaf_sharding(sharding: Sharding, param_shape: tuple[int, ...], leaf_shape: tuple[int, ...]) -> Sharding:
    """The sharding of one state array of a parameter that has ``sharding``.

    An array of the parameter's shape is split like it; anything else (a step counter, Adafactor's row and column averages) is
    replicated.
    """
    if leaf_shape == param_shape or not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def state_shardings(state: Mapping[str, Mapping[str, Any]], params: Mapping[str, jax.Array]) -> dict[str, dict[str, Sharding]]:
    """Shardings for a whole optimizer state, keyed like it: parameter name → state name → sharding.

    Args:
        state: parameter name → state name → anything with a ``shape`` (arrays, or what ``jax.eval_shape`` gives).
        params: parameter name → the parameter on its devices.
    """
    return {
        name: {key: leaf_sharding(params[name].sharding, params[name].shape, leaf.shape) for key, leaf in leaves.items()}
        for name, leaves in state.items()
    }
