"""Gradients that left the program so that hooks may see and change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from torch_compat.utilities.host_arrays import host_value, place
from xlatrain.bridge.tensors.dtypes import torch_dtype
from xlatrain.bridge.tensors.host import as_numpy, from_numpy
from xlatrain.bridge.tensors.lazy import LazyTensor, lazy_tensor
from xlatrain.bridge.tensors.strides import Strides


class VisibleGradients:
    """The gradients that ``p.grad`` shows between the backward pass and the update.

    A gradient is fetched when somebody reads it; the same tensor is shown until the update, so that in-place changes count.

    Args:
        arrays: parameter name → gradient, None where there is none.
        params: parameter name → array, whose sharding a gradient that user code sets gets.
        strides: of parameters that are not contiguous, which their gradients have too.
    """

    def __init__(
        self, arrays: Mapping[str, jax.Array | None], params: Mapping[str, jax.Array], strides: Mapping[str, Strides]
    ) -> None:
        self._strides = strides
        self._arrays = dict(arrays)
        self._params = params
        self._shown: dict[str, torch.Tensor | None] = {}

    def read(self, name: str) -> torch.Tensor | None:
        """The gradient of ``name`` as a CPU tensor of its shape and dtype, fetched when it is read; None if there is none."""
        if name not in self._shown:
            array = self._arrays.get(name)
            self._shown[name] = None if array is None else _lazily(array, self._strides.get(name))
        return self._shown[name]

    def set(self, name: str, grad: torch.Tensor | None) -> None:
        """Set ``p.grad = grad`` for the parameter ``name``; None: it has none."""
        self._shown[name] = grad

    def arrays(self) -> dict[str, jax.Array | None]:
        """The gradients as hooks left them: name → array in the dtype and sharding of its parameter; None where there is none."""
        for name, shown in self._shown.items():
            self._arrays[name] = self._changed(name, shown)
        self._shown.clear()
        return self._arrays

    def _changed(self, name: str, shown: torch.Tensor | None) -> jax.Array | None:
        """The array of a gradient that was shown: the old array if the values are the same, else the shown ones.

        New values take the dtype and sharding of the parameter.
        """
        if shown is None:
            return None
        if type(shown) is LazyTensor:  # nobody has looked
            return self._arrays[name]
        host = as_numpy(shown)
        array = self._arrays.get(name)
        if array is not None and np.array_equal(host, host_value(array), equal_nan=True):
            return array
        param = self._params[name]
        return place(np.array(host).astype(param.dtype), param.sharding)


def _lazily(array: jax.Array, strides: Strides | None) -> torch.Tensor:
    return lazy_tensor(array.shape, torch_dtype(array.dtype), lambda: from_numpy(np.array(host_value(array))), strides)


class _InProgram(torch.autograd.Function):
    """A graph that a captured step has been through already: differentiating it is an error."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "this loss belongs to a compiled step, whose backward pass is in its program: it cannot be differentiated in a hook. "
            "Do what needs its gradients in training_step, or override LightningModule.backward, which is captured"
        )


def of_captured_graph(loss: torch.Tensor) -> torch.Tensor:
    """``loss`` with its value, requiring grad as in stock Lightning; differentiating it is an error that says why."""
    with torch.enable_grad():
        return _InProgram.apply(loss.detach().clone(), torch.zeros((), requires_grad=True))  # pyright: ignore[reportReturnType]
