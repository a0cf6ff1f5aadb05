"""The layout of a captured optimizer's state of one parameter: which parts are arrays of the program, which stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.utils._pytree as pytree
from jax.typing import DTypeLike

from torch_compat.step.optimizers.state import exported
from xlatrain.bridge.capture.capture import TensorSpec
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import as_numpy


@dataclass(frozen=True)
class StateLayout:
    """The layout of one parameter's state dict: arrays by path, everything else as it was."""

    spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    """Per leaf its path and what it is: ``torch.Tensor``, ``int`` or ``float``, or the value itself of any other leaf."""


def layout_of(state: Mapping[str, Any], before: StateLayout | None = None) -> StateLayout:
    """The layout of a state dict; what was a Python number ``before`` and is a traced tensor now counts as a number."""
    numbers = {path: kind for path, kind in before.leaves if kind in (int, float)} if before is not None else {}
    keyed, spec = pytree.tree_flatten_with_path(dict(state))
    leaves = []
    for keys, leaf in keyed:
        path = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
        leaves.append((path, numbers.get(path) or _kind(leaf)))
    return StateLayout(spec, tuple(leaves))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor
    if isinstance(leaf, int | float) and not isinstance(leaf, bool):
        return type(leaf)
    return leaf


def is_array(kind: Any) -> bool:
    return kind is torch.Tensor or kind is int or kind is float


def as_array(leaf: Any, real: DTypeLike = jnp.float32) -> jax.Array:
    """A leaf of a captured result as an array; a number becomes an int32 scalar, or one of dtype ``real``.

    Numbers and tensors are leaves that do not depend on the inputs.
    """
    if isinstance(leaf, torch.Tensor):
        return jnp.asarray(as_numpy(leaf))
    if isinstance(leaf, int | float):
        return jnp.asarray(leaf, jnp.int32 if isinstance(leaf, int) else real)
    return leaf


def shape_of(leaf: Any, real: DTypeLike = jnp.float32) -> Any:
    """Shape and dtype of the array that a leaf of a captured result becomes."""
    if isinstance(leaf, TensorSpec):
        return jax.ShapeDtypeStruct(leaf.shape, jax_dtype(leaf.dtype))
    return jax.eval_shape(lambda: as_array(leaf, real)) if isinstance(leaf, torch.Tensor | int | float) else leaf


def exported_leaf(array: Any, kind: Any) -> Any:
    return exported(array) if kind is torch.Tensor else kind(array.item())
