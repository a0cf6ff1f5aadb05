"""``ctc_loss`` in terms of one custom op, since torch's own returns a tensor whose shape depends on the target lengths.

The op returns the losses and, in place of torch's table of forward probabilities, the gradient by ``log_probs`` of each. A loss
whose gradient nobody wants costs no more than the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.patches import patched

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity) "
    "-> (Tensor, Tensor)"
)


@fake_kernel(_LIBRARY, "ctc_loss")
def _fake(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the losses (N,) and of the gradients by ``log_probs`` (T, N, C)."""
    return log_probs.new_empty((log_probs.shape[1],)), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _padded(targets: torch.Tensor, target_lengths: torch.Tensor) -> torch.Tensor:
    """Concatenated targets as rows (N, S); S is the only bound known while tracing, all targets."""
    starts = torch.cumsum(target_lengths, 0) - target_lengths
    positions = starts[:, None] + torch.arange(targets.shape[0])
    return targets[positions.clamp(max=max(targets.shape[0] - 1, 0))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.zero_infinity = inputs[-1]
    ctx.save_for_backward(*output)


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    losses, gradient = ctx.saved_tensors
    if ctx.zero_infinity:
        gradient = torch.where(torch.isinf(losses)[:, None], 0.0, gradient)
    return gradient * grad[:, None], None, None, None, None, None


torch.library.register_autograd("xlatrain::ctc_loss", _backward, setup_context=_save, lib=_LIBRARY)

_MEAN, _SUM = 1, 2


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """``torch.ctc_loss``, with lengths as tensors or numbers, of one sequence or a batch."""
    of_input, of_target = (x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (input_lengths, target_lengths))
    is_batch = log_probs.ndim == 3
    if not is_batch:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
        of_input, of_target = of_input.reshape(1), of_target.reshape(1)
    rows = targets if targets.ndim == 2 else _padded(targets, of_target)
    losses, _ = torch.ops.xlatrain.ctc_loss(log_probs, rows, of_input, of_target, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(torch.isinf(losses), 0.0, losses)
    if reduction == _MEAN:
        return (losses / of_target.to(losses.dtype).clamp(min=1)).mean()
    if reduction == _SUM:
        return losses.sum()
    return losses if is_batch else losses.squeeze(0)


@contextlib.contextmanager
def traceable_ctc() -> Iterator[None]:
    """Within the block ``F.ctc_loss`` runs on ``xlatrain::ctc_loss``."""
    with patched([(torch, "ctc_loss", _ctc_loss)]):
        yield
