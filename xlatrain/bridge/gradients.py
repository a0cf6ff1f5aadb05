"""Gradients of leaves, as ``backward()`` leaves them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Gradients = Sequence[torch.Tensor | None]


def gradients_of(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], cotangents: Gradients | None = None
) -> list[torch.Tensor | None]:
    """``torch.autograd.grad``, and what backward passes inside of the backward pass add to ``leaves``.

    The backward of a ``torch.autograd.Function`` may run one of its own, as reversible layers do: its gradients go to ``.grad``,
    which ``torch.autograd.grad`` leaves out.

    Args:
        outputs: what is differentiated.
        leaves: of any shapes; what was in their ``.grad`` before is dropped.
        cotangents: of ``outputs``; without them these are scalars.

    Returns:
        One for each leaf, None where the outputs do not depend on it.
    """
    for leaf in leaves:
        leaf.grad = None
    found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return sums_of(found, [leaf.grad for leaf in leaves])


def sums_of(ones: Gradients, others: Gradients) -> list[torch.Tensor | None]:
    """The sum of each pair, where None adds nothing."""
    pairs = zip(ones, others, strict=True)
    return [other if one is None else one if other is None else one + other for one, other in pairs]
