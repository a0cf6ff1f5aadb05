"""Ordinary CPU tensors without memory.

A storageless tensor is a real ``torch.Tensor`` (or ``nn.Parameter``) on the CPU with shape, strides and a storage of the right
size whose address is null. Views of it, ``.data``, weak references and ``isinstance`` checks work as on any tensor, and it keeps
its identity when it gets memory later (``tensor.data = values``). Kernels must never see one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def storageless(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of this geometry that takes no memory."""
    elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), elements * dtype.itemsize)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))
    if elements:
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def storageless_like(tensor: torch.Tensor) -> torch.Tensor:
    """A storageless tensor with the shape, strides and dtype of ``tensor``."""
    return storageless(tensor.shape, tensor.stride(), tensor.dtype)
