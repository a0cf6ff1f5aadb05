"""Dynamic loss scaling in torch: on real tensors where steps run eagerly, on traced ones while a step is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from xlatrain.step.loss_scale import LossScaler, LossScaleState


class LossScaling:
    """Loss scaling as ``torch.amp.GradScaler`` does it around backward passes and optimizer steps.

    For each optimizer step: :meth:`unscale_`, the step, which must change nothing where :attr:`overflowed`, :meth:`update`.
    Reference: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling.

    Args:
        scaler: the options.
        scale: float32 scalar, what losses are multiplied by.
        growth_tracker: int32 scalar, steps with finite gradients since the scale last changed.

    Attributes:
        overflowed: bool scalar, whether a gradient of the optimizer that steps now is not finite; None between steps.
    """

    def __init__(self, scaler: LossScaler, scale: torch.Tensor, growth_tracker: torch.Tensor) -> None:
        self.scaler = scaler
        self.scale = scale
        self.growth_tracker = growth_tracker
        self.overflowed: torch.Tensor | None = None

    @classmethod
    def of_state(cls, scaler: LossScaler, state: LossScaleState) -> LossScaling:
        """Loss scaling of real tensors, from a state on any device."""
        scale = torch.tensor(float(state.scale), dtype=torch.float32)
        return cls(scaler, scale, torch.tensor(int(state.growth_tracker), dtype=torch.int32))

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to differentiate, at least float32."""
        return loss * self.scale

    def unscale_(self, params: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of ``params`` by the scale, in place, and look whether all are finite.

        Raises:
            RuntimeError: none of them has a gradient, as ``GradScaler.step`` says.
            ValueError: a float16 gradient, which would be unscaled into underflow.
        """
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            raise RuntimeError(
                "No inf checks were recorded for this optimizer: none of its parameters has a gradient. With "
                "precision='16-mixed' each optimizer.step() needs a backward pass before it"
            )
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("Attempting to unscale FP16 gradients: keep the parameters in float32 (precision='16-mixed')")
        with torch.no_grad():
            values = [grad._values() if grad.is_sparse else grad for grad in grads]
            finite = torch.stack([torch.isfinite(value).all() for value in values]).all()
            inverse = 1 / self.scale
            for value in values:
                value.mul_(inverse)
        self.overflowed = ~finite

    def update(self) -> None:
        """Update the scale after a step: back off if gradients overflowed, grow after ``growth_interval`` steps without."""
        assert self.overflowed is not None
        with torch.no_grad():
            clean_steps = self.growth_tracker + 1
            is_due = clean_steps == self.scaler.growth_interval
            grown = self.scale * self.scaler.growth_factor
            clean_scale = torch.where(is_due & torch.isfinite(grown), grown, self.scale)
            self.scale = torch.where(self.overflowed, self.scale * self.scaler.backoff_factor, clean_scale)
            self.growth_tracker = torch.where(self.overflowed | is_due, torch.zeros_like(clean_steps), clean_steps)
        self.overflowed = None

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of ``torch.amp.GradScaler.state_dict()``."""
        return self.scaler.state_dict(LossScaleState(self.scale, self.growth_tracker))  # pyright: ignore[reportArgumentType]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, options included.

        Raises:
            ValueError: an entry is missing.
        """
        restored = self.of_state(*LossScaler.from_state_dict(saved))
        self.scaler, self.scale, self.growth_tracker = restored.scaler, restored.scale, restored.growth_tracker


def of_grad_scaler(scaler: torch.amp.GradScaler) -> LossScaler:
    """The options of a ``GradScaler``, with its scale as the first one.

    Raises:
        ValueError: one that is switched off.
    """
    if not scaler.is_enabled():
        raise ValueError("GradScaler(enabled=False) scales nothing: give MixedPrecision no scaler, or use 'bf16-mixed'")
    return LossScaler(
        scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), int(scaler.get_growth_interval())
    )
