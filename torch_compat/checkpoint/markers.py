"""Markers in a checkpoint dict, in place of the arrays that are stored apart from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch

from torch_compat.checkpoint import host_state
from torch_compat.checkpoint.array_tensors import array_behind
from xlatrain.bridge.tensors.dtypes import torch_dtype
from xlatrain.bridge.tensors.live import live_array

TreePath = tuple[Any, ...]
"""Keys from the checkpoint dict down to a leaf, e.g. ``("state_dict", "fc.weight")``."""

_ARRAY = "xlatrain.array"


@dataclass(frozen=True)
class StoredArray:
    """The marker of an array: its name among those that are stored, and the dtype of the tensor that it was."""

    name: str
    dtype: torch.dtype


def split(
    checkpoint: Mapping[str, Any], on_mesh: Callable[[torch.Tensor], jax.Array | None] | None
) -> tuple[dict[str, jax.Array], Any]:
    """The arrays by name, and the dict with markers in their place. An array that occurs twice (tied weights) is stored once."""
    arrays: dict[str, jax.Array] = {}
    names: dict[int, str] = {}

    def match(node: Any) -> tuple[jax.Array | torch.nn.Parameter, torch.dtype] | None:
        if isinstance(node, jax.Array):
            return node, torch_dtype(node.dtype)
        if isinstance(node, torch.Tensor) and on_mesh is not None and (array := on_mesh(node)) is not None:
            return array, node.dtype
        if isinstance(node, torch.Tensor) and (array := array_behind(node)) is not None:
            return array, node.dtype
        if isinstance(node, torch.Tensor) and (array := live_array(node)) is not None:  # left on the mesh by an earlier run
            return array, node.dtype
        if isinstance(node, torch.nn.Parameter):
            return node, node.dtype
        if isinstance(node, dict) and _ARRAY in node:
            raise ValueError(f"the checkpoint dict holds a dict with the key {_ARRAY!r}, which is reserved; use another key")
        return None

    def replacement(found: tuple[jax.Array | torch.nn.Parameter, torch.dtype], path: TreePath) -> Any:
        array, dtype = found
        if isinstance(array, torch.nn.Parameter):  # a host parameter; in a stock state_dict it is a plain tensor
            return array.detach() if path[0] == "state_dict" else array
        if id(array) not in names:
            names[id(array)] = name = _unique("/".join(str(key) for key in path), arrays)
            arrays[name] = array
        return {_ARRAY: names[id(array)], "dtype": dtype}

    return arrays, host_state.replace_leaves(dict(checkpoint), match, replacement)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, or with a number if the keys 0 and "0" of one dict both lead to it."""
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}~{number}", number + 1
    return candidate


def stored_array(node: Any) -> StoredArray | None:
    return StoredArray(node[_ARRAY], node["dtype"]) if type(node) is dict and _ARRAY in node else None


def with_arrays(state: Any, read: Callable[[StoredArray], torch.Tensor]) -> Any:
    """``state`` with a tensor in place of each marker."""
    return host_state.replace_leaves(state, stored_array, lambda stored, _: read(stored))
