"""Products of a batch by one matrix, for XLA:CPU.

``torch.matmul`` of an input that is not contiguous, as ``batch_first`` of a recurrent layer makes it, is a batched product with
the matrix expanded to the batch where neither wants a gradient, as in frozen layers. XLA:CPU writes that copy for each row.
"""

from __future__ import annotations

import jax
import torch
from torch.fx.node import Node

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.alias.default, _aten.detach.default)


def unexpanded(node: Node, operands: list[jax.Array]) -> list[jax.Array]:
    """``operands`` of an ``aten.bmm`` (B, …, …), but one that is the same for the whole batch without its first dim."""
    for place, source in enumerate(node.args):
        if isinstance(source, Node) and _is_expanded(source):
            return [one[0] if at == place else one for at, one in enumerate(operands)]
    return operands


def _is_expanded(node: Node) -> bool:
    """Whether the first dim of ``node`` has been made by ``expand``; strides alone do not tell what was written to since."""
    value = node.meta["val"]
    if value.stride(0) != 0 or value.shape[0] == 1:
        return False
    while node.target in _VIEWS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.target is _aten.expand.default
