"""PyTorch's functionalization, for functions that also use tensors from outside of them, or assign ``tensor.data``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

_torch: Any = torch


class Functionalization(FunctionalTensorMode):
    """PyTorch's functionalization, where results of ops on tensors from outside alone (``zeros_like(MASK)``) are functional too.

    PyTorch leaves these as they are, and an op that then writes to one stays in the graph as it is, or is an error.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if type(result) is FunctionalTensor or not isinstance(func, torch._ops.OpOverload):
            return result
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result  # a view of a tensor from outside: writing to it writes there
        return pytree.tree_map_only(torch.Tensor, self._functional, result)

    def _functional(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a functional tensor of this mode."""
        if isinstance(tensor, FunctionalTensor):
            return tensor
        return FunctionalTensor(_torch._to_functional_tensor(tensor), self)


_DATA = torch._C.TensorBase.__dict__["data"]


def _get(self: torch.Tensor) -> torch.Tensor:
    return _DATA.__get__(self)


def _set(self: torch.Tensor, value: torch.Tensor) -> None:
    # set_ moves the tensor to value's storage, as assigning .data does: earlier views keep the old values. Below autograd, which
    # would take the tensor for another one, without a part in what was computed of it before; uncounted, too, as in torch.
    with torch.autograd._unsafe_preserve_version_counter(self), torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateImportUsage]
        torch.ops.aten.set_.source_Tensor(self, value)


@contextlib.contextmanager
def assignable_data(kind: type[torch.Tensor]) -> Iterator[None]:
    """Within the block assigning ``.data`` of a traced tensor, of class ``kind``, is captured; torch ignores it silently."""
    kind.data = property(_get, _set)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del kind.data
