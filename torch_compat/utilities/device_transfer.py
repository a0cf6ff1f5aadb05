"""Moving nested data between devices (``lightning.fabric.utilities.apply_func``)."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection

__all__ = [
    "TransferableDataType",
    "apply_to_collection",
    "convert_tensors_to_scalars",
    "convert_to_tensors",
    "move_data_to_device",
]

# From a pageable host copy, an asynchronous transfer to these would read memory that may already be reused.
_BLOCKING_DEVICE_TYPES = ("cpu", "mps")


@runtime_checkable
class TransferableDataType(Protocol):
    """Anything with ``.to(device)``: tensors, ``PackedSequence``, ``transformers.BatchEncoding``, users' own batches."""

    def to(self, *args: Any, **kwargs: Any) -> Any: ...


def move_data_to_device(batch: Any, device: torch.device | str | int) -> Any:
    """``batch`` with everything that has ``.to()`` moved to ``device``; other leaves are returned as they are.

    Collections of any nesting are rebuilt (dict, list, tuple, namedtuple, dataclass); a tensor that is already there is not
    copied. (API: ``lightning.pytorch.utilities.move_data_to_device``.)
    """
    target = torch.device(device)

    def move(data: TransferableDataType) -> Any:
        non_blocking = isinstance(data, torch.Tensor) and target.type not in _BLOCKING_DEVICE_TYPES
        moved = data.to(target, non_blocking=True) if non_blocking else data.to(target)
        # A `.to()` that works in place and returns nothing is a common slip in users' batch classes.
        return data if moved is None else moved

    return apply_to_collection(batch, dtype=TransferableDataType, function=move)


def convert_to_tensors(data: Any, device: torch.device | str) -> Any:
    """Numbers (bool → uint8, int → int32, float → float32) and numpy arrays in ``data`` as contiguous tensors on ``device``."""
    for kind, dtype in ((bool, torch.uint8), (int, torch.int), (float, torch.float)):
        data = apply_to_collection(data, kind, partial(torch.tensor, dtype=dtype, device=device))
    data = apply_to_collection(data, np.ndarray, lambda array: torch.from_numpy(array).to(device))
    return apply_to_collection(data, torch.Tensor, lambda tensor: tensor.to(device).contiguous())


def convert_tensors_to_scalars(data: Any) -> Any:
    """Convert one-element tensors in ``data`` to Python numbers; ``ValueError`` for a tensor with more elements."""

    def to_number(value: torch.Tensor) -> float | int | bool:
        if value.numel() != 1:
            raise ValueError(f"The metric `{value}` does not contain a single element: reduce it, as with .mean()")
        return value.item()

    return apply_to_collection(data, torch.Tensor, to_number)
