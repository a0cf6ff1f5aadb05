"""Gradients that left the program so that hooks may see and change them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import torch

from torch_compat.functional.host_arrays import host_value, place
from xlatrain.bridge.host import as_numpy, from_numpy


class VisibleGradients:
    """What ``p.grad`` shows between the backward pass and the update.

    A gradient is fetched when somebody reads it; the same tensor is shown until the update, so that in-place changes count.

    Args:
        arrays: parameter name → gradient, None where there is none.
        params: parameter name → array, whose sharding a gradient that user code sets gets.
    """

    def __init__(self, arrays: Mapping[str, jax.Array | None], params: Mapping[str, jax.Array]) -> None:
        self._arrays = dict(arrays)
        self._params = params
        self._shown: dict[str, torch.Tensor | None] = {}

    def read(self, name: str) -> torch.Tensor | None:
        """The gradient of ``name`` as a host tensor."""
        if name not in self._shown:
            array = self._arrays.get(name)
            self._shown[name] = None if array is None else from_numpy(np.array(host_value(array)))
        return self._shown[name]

    def set(self, name: str, grad: torch.Tensor | None) -> None:
        """``p.grad = grad``."""
        self._shown[name] = grad

    def arrays(self) -> dict[str, jax.Array | None]:
        """The gradients as hooks left them."""
        for name, shown in self._shown.items():
            self._arrays[name] = self._changed(name, shown)
        self._shown.clear()
        return self._arrays

    def _changed(self, name: str, shown: torch.Tensor | None) -> jax.Array | None:
        if shown is None:
            return None
        host = as_numpy(shown)
        array = self._arrays.get(name)
        if array is not None and np.array_equal(host, host_value(array), equal_nan=True):
            return array
        param = self._params[name]
        return place(np.array(host).astype(param.dtype), param.sharding)
