"""Precision plugins of stock's on the mesh: those that say dtypes, and do nothing on a device of torch's."""

from __future__ import annotations

import jax
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from torch_compat.stock_trainer.stock import refuse

_DTYPES = (Precision, HalfPrecision, DoublePrecision)
_OFFERED = "choose one of '32-true', 'bf16-mixed', 'bf16-true', '16-true', '64-true'"


def for_mesh(plugin: Precision) -> Precision:
    """The plugin with which steps are captured, on the CPU.

    Raises:
        MisconfigurationException: one that scales the loss, that calls CUDA's kernels, or of the user's.
    """
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return plugin if plugin.device == "cpu" else MixedPrecision("bf16-mixed", "cpu")
    if type(plugin) not in _DTYPES:
        why = "loss scaling" if plugin.precision == "16-mixed" else f"what a {type(plugin).__name__} does"
        raise refuse(f"Trainer(precision={plugin.precision!r})", f"{why} is no part of a program here", _OFFERED)
    if type(plugin) is DoublePrecision:
        jax.config.update("jax_enable_x64", True)
    return plugin
