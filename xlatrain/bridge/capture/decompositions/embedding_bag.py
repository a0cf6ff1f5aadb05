"""``embedding_bag`` and its backward in terms of gathers and scatters.

torch's CPU kernels return bookkeeping tensors whose shapes depend on which of them ran; these decompositions return all of them
in full, which only their own backward reads. With ``scale_grad_by_freq`` torch's CPU kernel divides by the counts of other rows
(2.13, where a bag's indices repeat); here each row's gradient is divided by its own count, as documented and as on CUDA.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from xlatrain.bridge.errors import CaptureError, user_line

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2


def _counted(indices: torch.Tensor, padding_idx: int) -> torch.Tensor:
    """A mask of the indices (L,) that take part, bool (L,): all but the padding."""
    return indices != padding_idx if padding_idx >= 0 else torch.ones_like(indices, dtype=torch.bool)


def _per_bag(bags: int, bag: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The sums (bags, …) of the values (L, …) of each bag, given the bag of each index (L,)."""
    return values.new_zeros((bags, *values.shape[1:])).index_add(0, bag, values)


def _refuse_sparse(sparse: bool) -> None:
    """Refuse sparse gradients.

    Raises:
        CaptureError: ``sparse``, with the user's line.
    """
    if sparse:
        raise CaptureError(
            f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: embedding_bag with sparse=True has "
            "sparse gradients, which XLA does not have.\n  Fix: use sparse=False."
        )


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bags (B, D), the bag of each index (L,), the number of indices per bag (B,), each maximum's weight row (B, D)."""
    _refuse_sparse(sparse)
    if include_last_offset:
        offsets = offsets[:-1]
    bags, positions = offsets.shape[0], torch.arange(indices.shape[0], dtype=offsets.dtype)
    bag = torch.searchsorted(offsets, positions, right=True).to(offsets.dtype) - 1
    counted = _counted(indices, padding_idx)
    sizes = _per_bag(bags, bag, counted.to(offsets.dtype))
    rows = weight[indices]
    empty = (sizes == 0)[:, None]
    if mode == _MAX:
        lowest = torch.where(counted[:, None], rows, float("-inf"))
        spread = bag[:, None].expand_as(rows).long()
        top = torch.full((bags, rows.shape[1]), float("-inf"), dtype=rows.dtype).scatter_reduce(0, spread, lowest, "amax")
        # the first index of the bag that has the maximum
        here = torch.where(counted[:, None] & (rows == top[bag]), positions[:, None].expand_as(rows), indices.shape[0])
        first = torch.full_like(top, indices.shape[0], dtype=offsets.dtype).scatter_reduce(0, spread, here, "amin")
        maximum = torch.where(empty, 0, indices[first.clamp(max=indices.shape[0] - 1)])
        return torch.where(empty, 0.0, top), bag, sizes, maximum
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    total = _per_bag(bags, bag, torch.where(counted[:, None], rows, 0.0))
    if mode == _MEAN:
        total = total / sizes.clamp(min=1)[:, None]
    return total, bag, sizes, sizes


def embedding_bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag: torch.Tensor,
    sizes: torch.Tensor,
    maximum: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> torch.Tensor:
    """The gradient by the weight (num_weights, D), given ``grad`` (B, D) and the forward pass's bookkeeping."""
    _refuse_sparse(sparse)
    zeros = grad.new_zeros((num_weights, grad.shape[1]))
    if mode == _MAX:
        return zeros.scatter_add(0, maximum.long(), torch.where((sizes == 0)[:, None], 0.0, grad))
    if mode == _MEAN:
        grad = grad / sizes.clamp(min=1)[:, None]
    rows = grad[bag]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    if scale_grad_by_freq:
        uses = torch.zeros(num_weights, dtype=rows.dtype).index_add(0, indices, torch.ones_like(indices, dtype=rows.dtype))
        rows = rows / uses[indices][:, None]
    return zeros.index_add(0, indices, torch.where(_counted(indices, padding_idx)[:, None], rows, 0.0))


def embedding_bag_per_sample_weights_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> torch.Tensor:
    """The gradient by ``per_sample_weights`` (L,)."""
    return torch.where(_counted(indices, padding_idx), (grad[bag] * weight[indices]).sum(dim=1), 0.0)


def embedding_bag_decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The decompositions of ``embedding_bag`` and its backward."""
    return {
        aten._embedding_bag.default: embedding_bag,
        aten._embedding_bag_forward_only.default: embedding_bag,
        aten._embedding_bag_backward.default: embedding_bag_backward,
        aten._embedding_bag_per_sample_weights_backward.default: embedding_bag_per_sample_weights_backward,
    }
