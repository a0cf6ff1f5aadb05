"""xlatrain: meshes, sharding, compiled steps and sharded checkpoints for JAX and, through a bridge, PyTorch.

Importing this package starts no JAX backend and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xlatrain.supported import JAX

if TYPE_CHECKING:
    from xlatrain.step.fit import fit
    from xlatrain.step.jax_module import JaxModule

__version__ = "0.1.0"

JAX.check()

__all__ = ["JaxModule", "fit"]


def __getattr__(name: str) -> Any:
    if name == "JaxModule":
        return importlib.import_module("xlatrain.step.jax_module").JaxModule
    if name == "fit":
        return importlib.import_module("xlatrain.step.fit").fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
