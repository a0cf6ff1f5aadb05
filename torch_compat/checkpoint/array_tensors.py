"""Tensors that stand for arrays on a mesh, where user code expects tensors: in the dict of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import torch

from torch_compat.utilities.host_arrays import to_torch
from xlatrain.bridge.tensors.lazy import lazy_tensor, unread_lazy


@dataclass(frozen=True)
class _Fetch:
    """Brings the values to the host."""

    array: jax.Array
    dtype: torch.dtype

    def __call__(self) -> torch.Tensor:
        return to_torch(self.array, self.dtype)


def array_tensor(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of ``dtype`` with the array's values, fetched when something first needs them."""
    return lazy_tensor(tuple(array.shape), dtype, _Fetch(array, dtype))


def array_behind(tensor: torch.Tensor) -> jax.Array | None:
    """The array that :func:`array_tensor` was given, unless the values have been read (and perhaps changed) since."""
    fetch = unread_lazy(tensor)
    return fetch.array if isinstance(fetch, _Fetch) else None
