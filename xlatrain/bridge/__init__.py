"""The bridge from a PyTorch step to a JAX function: PyTorch captures, JAX lowers. Only here ``xlatrain`` imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from xlatrain.supported import TORCH

if TYPE_CHECKING:
    from xlatrain.bridge.torch_function import to_jax

__all__ = ["to_jax"]

TORCH.check(torch.__version__)


def __getattr__(name: str) -> Any:
    if name == "to_jax":
        return importlib.import_module("xlatrain.bridge.torch_function").to_jax
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
