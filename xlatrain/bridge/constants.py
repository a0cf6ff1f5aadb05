"""Tensors from outside of a step whose values are a part of its graph: what is in them, and whether that has changed."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

SMALL = 1 << 16
"""Bytes. The values of larger tensors are not looked at before each step: writes to them are seen where torch counts them."""


def bytes_of(tensor: torch.Tensor) -> np.ndarray | None:
    """The memory of a dense tensor on the host, uint8[n], in place where it is contiguous; None for any other tensor."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    with _disable_current_modes():  # a step may be running on fake tensors
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return dense.reshape(-1).view(torch.uint8).numpy()


def contents_of(tensor: torch.Tensor) -> str:
    """Text that is equal for tensors of equal values."""
    found = bytes_of(tensor)
    return "" if found is None else hashlib.blake2b(found.tobytes(), digest_size=16).hexdigest()


class BakedTensor:
    """A tensor as a graph has it.

    Args:
        tensor: from outside of the step, which the user may go on to write to.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = tensor._version
        self._place = tensor.data_ptr()
        found = bytes_of(tensor) if tensor.nbytes <= SMALL and tensor.is_contiguous() else None
        self._memory = found
        self._values = None if found is None else found.tobytes()

    def is_unchanged(self) -> bool:
        """Whether it has the values of then; cheap. Writes that torch does not count (``.data``, numpy) are seen if small."""
        return (
            self.tensor._version == self._version
            and self.tensor.data_ptr() == self._place
            and (self._memory is None or self._memory.tobytes() == self._values)
        )
