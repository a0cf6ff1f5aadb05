"""Precision plugins of stock's on the mesh: those that say dtypes, and do nothing on a device of torch's."""

from __future__ import annotations

from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision, TransformerEnginePrecision

from torch_compat.stock_trainer.stock import INSTEAD, refuse
from torch_compat.utilities.wide_types import keep_wide_types

_OFFERED = "choose one of '32-true', 'bf16-mixed', 'bf16-true', '16-true', '64-true'"
_NOT_CALLED = (
    *("pre_backward", "backward", "post_backward", "optimizer_step", "main_params", "unscale_gradients"),
    *("clip_gradients", "clip_grad_by_value", "clip_grad_by_norm"),
    *("train_step_context", "val_step_context", "test_step_context", "predict_step_context"),
)
"""Members that have no place in a step that is one program, or in its capture."""


def for_mesh(plugin: Precision) -> Precision:
    """The plugin with which steps are captured, on the CPU.

    Raises:
        MisconfigurationException: one that scales the loss, calls CUDA's kernels, or has a member that is not called.
    """
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return plugin if plugin.device == "cpu" else MixedPrecision("bf16-mixed", "cpu")
    if type(plugin) is MixedPrecision:
        raise refuse(f"Trainer(precision={plugin.precision!r})", "loss scaling is no part of a program here", _OFFERED)
    if isinstance(plugin, TransformerEnginePrecision):
        raise refuse("TransformerEnginePrecision", "its layers are kernels for CUDA", f"{_OFFERED}; {INSTEAD} for float8")
    for name in _NOT_CALLED:
        if getattr(type(plugin), name, None) is not getattr(Precision, name, None):
            raise refuse(f"{type(plugin).__name__}.{name}", "a step is one program, which does not call it", _OFFERED)
    keep_wide_types(plugin, isinstance(plugin, DoublePrecision))
    return plugin
