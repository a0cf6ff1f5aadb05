"""Optimizer state on its way from the host to the mesh and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from torch_compat.checkpoint.array_tensors import array_behind, array_tensor
from torch_compat.checkpoint.checkpoint_dict import restore_arrays
from torch_compat.utilities.host_arrays import host_value, place, to_torch
from xlatrain.bridge.tensors.dtypes import torch_dtype
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.bridge.tensors.lazy import unread_lazy
from xlatrain.step.optimizers.by_parameter import leaf_sharding, state_shardings
from xlatrain.step.optimizers.rule import State


@dataclass(frozen=True)
class _Unread:
    """A leaf that :func:`place_unread` reads from a checkpoint."""

    values: torch.Tensor
    template: jax.ShapeDtypeStruct


def place_state(values: torch.Tensor | np.ndarray, param: jax.Array, dtype: np.typing.DTypeLike) -> Any:
    """``values``, the same on every process, as a global array of ``dtype`` placed as state of ``param``.

    For a lazy tensor that nobody has read: a leaf for :func:`place_unread`.
    """
    sharding = leaf_sharding(param.sharding, param.shape, tuple(values.shape))
    if isinstance(values, torch.Tensor):
        if unread_lazy(values) is not None:
            return _Unread(values, jax.ShapeDtypeStruct(tuple(values.shape), np.dtype(dtype), sharding=sharding))
        values = as_numpy(values)
    return place(np.array(values, dtype), sharding)  # a copy: JAX may keep the buffer, which torch goes on writing to


def place_unread(state: dict[str, State]) -> dict[str, State]:
    """Read the leaves of ``state`` that are still in a checkpoint, directly onto their shards."""
    unread = {(name, key): leaf for name, leaves in state.items() for key, leaf in leaves.items() if isinstance(leaf, _Unread)}
    if not unread:
        return state
    tree: dict[str, dict[str, torch.Tensor]] = {}
    for (name, key), leaf in unread.items():
        tree.setdefault(name, {})[key] = leaf.values
    placed = restore_arrays(tree, {path: leaf.template for path, leaf in unread.items()})
    return {name: {key: placed.get((name, key), leaf) for key, leaf in leaves.items()} for name, leaves in state.items()}


def make_state(init: Callable[[Mapping[str, jax.Array]], dict[str, State]], params: Mapping[str, jax.Array]) -> dict[str, State]:
    """The optimizer's state ``init(params)``, computed in one program, each array directly on the devices of its parameter."""
    if not params:
        return {}
    shardings = state_shardings(jax.eval_shape(init, params), params)
    return jax.jit(init, out_shardings=shardings)(params)  # without compiler_options: zeros


def scalars_on_host(state: Any) -> Any:
    """Every 0-d array of a pytree as numpy; the others stay where they are."""
    return jax.tree.map(lambda leaf: host_value(leaf) if leaf.ndim == 0 else leaf, state)


def exported(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A state array as the tensor that torch's optimizer has for it; one on a mesh is read when something needs its values.

    Args:
        value: a jax or numpy array.
        dtype: of the tensor; default: the array's own.
    """
    if not isinstance(value, jax.Array):
        return to_torch(value, dtype)
    return array_tensor(value, dtype or torch_dtype(value.dtype))


def read_exported(optimizer: torch.optim.Optimizer) -> None:
    """Bring what :func:`exported` left on the mesh to the host. Collective where the arrays span processes."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and array_behind(value) is not None:
                value.detach()
