"""``x[mask] = value`` while a step is captured, for one value that fills every True place (a learned mask token).

torch writes it by index, and the gradient of ``value`` then gathers the True places, whose number is not known while compiling.
As a select the forward is the same and the gradient a masked sum of fixed shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xlatrain.bridge.patches import patched


def _fills_mask(x: torch.Tensor, index: Any, value: Any) -> bool:
    """True for a boolean mask over leading dims of ``x`` and a tensor that has no dim of its own for the True places."""
    if not (isinstance(index, torch.Tensor) and index.dtype == torch.bool and isinstance(value, torch.Tensor)):
        return False
    trailing = x.ndim - index.ndim
    whole = tuple(x.shape[: index.ndim]) == tuple(index.shape)
    return whole and (value.ndim <= trailing or (value.ndim == trailing + 1 and value.shape[0] == 1))


@contextlib.contextmanager
def selecting_masked_assignment() -> Iterator[None]:
    """Within the block, assignments through boolean masks are selects; all other assignments are torch's own."""
    assign = torch.Tensor.__setitem__

    def set_item(self: torch.Tensor, index: Any, value: Any) -> None:
        if not _fills_mask(self, index, value):
            assign(self, index, value)
            return
        trailing = self.ndim - index.ndim
        mask = index.reshape(*index.shape, *(1,) * trailing)
        one = value.reshape(value.shape[1:]) if value.ndim > trailing else value
        self.copy_(torch.where(mask, one.to(self.dtype), self))

    with patched([(torch.Tensor, "__setitem__", set_item)]):
        yield
