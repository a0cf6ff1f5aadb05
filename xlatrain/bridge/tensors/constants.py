"""Tensors from outside of a step whose values are a part of its graph: what is in them, and whether that has changed."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from xlatrain.bridge.errors import CaptureError

SMALL = 1 << 16
"""Bytes. Of larger tensors so many are compared before each step, and a sample; writes that torch counts are seen at once."""
_SAMPLED = 128  # words of 8 bytes


def bytes_of(tensor: torch.Tensor) -> np.ndarray | None:
    """The memory of a dense tensor on the host, uint8[n], in place where it is contiguous; None for any other tensor."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    with _disable_current_modes():  # a step may be running on fake tensors
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
        # Without Tensor.numpy(), after which torch no longer lets the tensor be resized.
        return np.asarray(_Memory(dense))


class _Memory:
    """The memory of a dense tensor, which may be a copy that nobody else keeps, for numpy: uint8[n]."""

    def __init__(self, dense: torch.Tensor) -> None:
        self._tensor = dense
        size = dense.numel() * dense.element_size()
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (dense.data_ptr(), False), "version": 3}


def contents_of(tensor: torch.Tensor) -> str:
    """Text that is equal for tensors of equal values."""
    found = bytes_of(tensor)
    return "" if found is None else hashlib.blake2b(found.tobytes(), digest_size=16).hexdigest()


class BakedTensor:
    """A tensor that is a constant of a graph, with the values that the graph was made with.

    Args:
        tensor: from outside of the step, which the user may go on to write to.
        name: as a user knows it.
    """

    def __init__(self, tensor: torch.Tensor, name: str | None = None) -> None:
        self.tensor = tensor
        self._name = name or f"a tensor {tuple(tensor.shape)} of {tensor.dtype}"
        self._looks = 0
        self.refresh()

    def refresh(self) -> None:
        """Take the tensor's present values as the values that the graph was made with."""
        self._version = self.tensor._version
        self._place = self.tensor.data_ptr()
        memory = bytes_of(self.tensor) if self.tensor.is_contiguous() else None
        self._memory = memory
        self._values = b"" if memory is None else memory.tobytes()
        words = None if memory is None or memory.size <= SMALL else memory[: memory.size // 8 * 8].view(np.uint64)
        self._sample = None if words is None else words[:: max(1, words.size // _SAMPLED)]
        self._sampled = b"" if self._sample is None else self._sample.tobytes()

    def is_unchanged(self) -> bool:
        """Whether the tensor has the values of the last refresh. Cheap: of a large tensor a sample, and a part in turn.

        Raises:
            CaptureError: a part has changed, maybe some steps ago.
        """
        if self.tensor._version != self._version or self.tensor.data_ptr() != self._place:
            return False
        if self._memory is None:
            return True
        if self._sample is None:
            return self._memory.tobytes() == self._values
        if self._sample.tobytes() != self._sampled:
            return False
        start = self._looks * SMALL % len(self._values)
        self._looks += 1
        if self._memory[start : start + SMALL].tobytes() != self._values[start : start + SMALL]:
            error = CaptureError(
                f"{self._name}, with which the step computes, was written to in a way that torch does not count (numpy, .data), "
                f"in a few entries of {self.tensor.numel():,}: so large a tensor is compared in parts, one before each step, and "
                "some steps may have run with the old values. Make it a buffer (self.register_buffer), or write to the tensor "
                "itself"
            )
            error.recoverable = False
            raise error
        return True

    def is_whole(self) -> bool:
        """Whether the tensor has all of the values of the last refresh."""
        return self._memory is None or self._memory.tobytes() == self._values
