"""Counting floating-point operations (``lightning.fabric.utilities.throughput.measure_flops``)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def measure_flops(model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None) -> int:
    """Floating-point operations of a forward, or of a forward and a backward.

    Args:
        model: the model, best on the meta device, where nothing is computed.
        forward_fn: runs the forward and returns its output.
        loss_fn: makes a scalar of the output; its backward is then counted too.

    Returns:
        The number of operations, a multiply-add counting as two. Ops without a formula in ``torch.utils.flop_counter`` count 0.
    """
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return counter.get_total_flops()
