"""Memory that is not torch's own: that of an array, of a buffer of bytes, or one that an array has been given."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

REAL = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors from outside of a run."""


Told = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with a tensor that has foreign memory, its copy, which a graph has as a constant, and what the run computes with."""

_TOLD: contextvars.ContextVar[Told | None] = contextvars.ContextVar("xlatrain_lifted", default=None)


@contextlib.contextmanager
def telling_lifted(told: Told) -> Iterator[None]:
    """Tell of each tensor that a function of torch makes of foreign memory (``torch.from_numpy``, ``torch.as_tensor``)."""
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether others than torch may have the memory of a tensor from outside of the run: torch no longer resizes it."""
    return type(tensor) in REAL and tensor.layout == torch.strided and not tensor.untyped_storage().resizable()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its values of now in memory of its own: who has the other memory may change it after the run."""
    with _disable_current_modes():
        return tensor.detach().clone()


def tell_lifted(outside: torch.Tensor, copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """See :func:`telling_lifted`."""
    if (told := _TOLD.get()) is not None:
        told(outside, copy, tensor)


def span_of(tensor: torch.Tensor, *, foreign: bool = False) -> tuple[int, int] | None:
    """The addresses of the memory that a tensor from outside of the run has: the first, and the one after the last.

    Args:
        foreign: None for memory of torch's own.
    """
    with torch._C.DisableTorchFunctionSubclass():  # of a parameter or buffer the host's own memory, not what stands for it
        if tensor.layout != torch.strided or (foreign and tensor.untyped_storage().resizable()):
            return None
        storage = tensor.untyped_storage()
        try:
            return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        except RuntimeError:  # one that has no memory on the host, as a parameter that was born sharded
            return None
