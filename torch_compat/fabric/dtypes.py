"""Conversions of the inputs and outputs of a set-up module, by precision."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from torch_compat.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision


def convert_inputs(precision: Precision, data: Any) -> Any:
    """Floating-point tensors in the precision's dtype; float32 where autocast chooses it later."""
    if isinstance(precision, MixedPrecision) and not precision.converts_input:
        return _converted(data, torch.float32)
    if not precision.converts_input:
        return data
    return precision.convert_input(data)


def convert_outputs(precision: Precision, data: Any) -> Any:
    """Floating-point tensors in the default dtype, as the caller of a module expects them."""
    if isinstance(precision, MixedPrecision | HalfPrecision | DoublePrecision):
        data = _converted(data, torch.get_default_dtype())
    return precision.convert_output(data)


def _converted(data: Any, dtype: torch.dtype) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(data, Tensor, convert)
