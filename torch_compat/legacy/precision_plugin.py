"""Precision plugins of 1.3 to 1.5. API: ``pytorch_lightning.plugins.PrecisionPlugin``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_compat.legacy.training_type_plugin import Plugin
from torch_compat.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule


__all__ = [
    "DoublePrecision",
    "DoublePrecisionPlugin",
    "HalfPrecision",
    "MixedPrecision",
    "NativeMixedPrecisionPlugin",
    "Precision",
    "PrecisionPlugin",
]


class PrecisionPlugin(Plugin, Precision):
    """Full precision, with the members that plugins of 1.3 to 1.5 override.

    ``pre_optimizer_step`` returning False skips the update; ``pre_backward``, ``post_backward`` and ``backward`` see the
    real loss on the host, except that ``backward`` is captured.
    """

    backend: Any = None

    def master_params(self, optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
        """The parameters that the optimizer updates."""
        return self.main_params(optimizer)

    def pre_backward(self, model: LightningModule, closure_loss: Tensor) -> Tensor:
        """Called before backward, on the host, with the real loss."""
        return closure_loss

    def post_backward(self, model: LightningModule, closure_loss: Tensor) -> Tensor:
        """Called after backward, on the host; returns the detached loss."""
        return closure_loss.detach()

    def backward(
        self,
        model: LightningModule,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        opt_idx: int = 0,
        should_accumulate: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The gradients of the loss."""
        model.trainer.strategy.run_backward(closure_loss, *args, **kwargs)
        return closure_loss.detach()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """The update of an optimizer."""
        return model.trainer.strategy.make_update(optimizer, closure, **kwargs)

    def pre_optimizer_step(
        self,
        pl_module: LightningModule,
        optimizer: Optimizer,
        optimizer_idx: int,
        lambda_closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> bool:
        """Called before the update; False skips it."""
        return True

    def post_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int) -> None:
        """Called after the update."""

    # Those of 2.x, and not Plugin's.
    train_step_context = Precision.train_step_context  # pyright: ignore[reportAssignmentType]
    val_step_context = Precision.val_step_context
    test_step_context = Precision.test_step_context
    predict_step_context = Precision.predict_step_context


class NativeMixedPrecisionPlugin(PrecisionPlugin, MixedPrecision):
    """``torch.autocast`` around the steps.

    Args:
        precision: 16 or ``"bf16"``.
        use_cpu: 1.5's argument; the mesh decides.
    """

    backend = "native"

    def __init__(self, precision: int | str = 16, use_cpu: bool = False, scaler: Any = None) -> None:
        name = {"16": "16-mixed", "bf16": "bf16-mixed"}.get(str(precision), str(precision))
        MixedPrecision.__init__(self, name, scaler=scaler)


class DoublePrecisionPlugin(PrecisionPlugin, DoublePrecision):
    """Training in float64."""
