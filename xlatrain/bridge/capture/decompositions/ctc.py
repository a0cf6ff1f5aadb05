"""``ctc_loss`` in terms of one custom op, since torch's own returns a tensor whose shape depends on the target lengths.

The op returns the losses and, in place of torch's table of forward probabilities, the gradient by ``log_probs`` of each; torch's
autograd passes it on to the backward as it would that table. A loss whose gradient nobody wants costs no more than the loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xlatrain.bridge.patches import patched

aten = torch.ops.aten

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank) -> (Tensor, Tensor)"
)


@torch.library.register_fake("xlatrain::ctc_loss", lib=_LIBRARY)
def _fake(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor, blank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of the losses (N,) and of the gradients by ``log_probs`` (T, N, C)."""
    return log_probs.new_empty((log_probs.shape[1],)), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _padded(targets: torch.Tensor, target_lengths: torch.Tensor) -> torch.Tensor:
    """Concatenated targets as rows (N, S); S is the only bound known while tracing, all targets."""
    starts = torch.cumsum(target_lengths, 0) - target_lengths
    positions = starts[:, None] + torch.arange(targets.shape[0])
    return targets[positions.clamp(max=max(targets.shape[0] - 1, 0))]


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log likelihoods (N,), and the gradient of each by ``log_probs`` (T, N, C)."""
    rows = targets if targets.ndim == 2 else _padded(targets, target_lengths)
    return torch.ops.xlatrain.ctc_loss(log_probs, rows, input_lengths, target_lengths, blank)


def ctc_loss_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    neg_log_likelihood: torch.Tensor,
    gradient: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The gradient by ``log_probs``."""
    if zero_infinity:
        gradient = torch.where(torch.isinf(neg_log_likelihood)[:, None], 0.0, gradient)
    return gradient * grad[:, None]


def ctc_decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The decompositions of ``ctc_loss`` with lengths as tensors, and of its backward."""
    return {aten._ctc_loss.Tensor: ctc_loss, aten._ctc_loss_backward.Tensor: ctc_loss_backward}


@contextlib.contextmanager
def ctc_lengths_as_tensors() -> Iterator[None]:
    """Within the block ``F.ctc_loss`` takes the path with lengths as tensors also where they are given as numbers."""
    original: Callable[..., torch.Tensor] = torch.ctc_loss

    def with_tensors(
        log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        lengths = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (input_lengths, target_lengths)]
        return original(log_probs, targets, *lengths, *args, **kwargs)

    with patched([(torch, "ctc_loss", with_tensors)]):
        yield
