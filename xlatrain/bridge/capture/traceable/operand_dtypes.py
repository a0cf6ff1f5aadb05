"""Products of two dtypes: eager torch refuses them, PyTorch's tracer does not look, and XLA would promote silently."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx

_OPERANDS = {
    "aten.mm.default": slice(0, 2),
    "aten.addmm.default": slice(0, 3),
    "aten.bmm.default": slice(0, 2),
    "aten.baddbmm.default": slice(0, 3),
    "aten.convolution.default": slice(0, 3),
}
"""Ops whose operands must have one dtype, and which of their arguments these are."""


def check_operand_dtypes(graph: torch.fx.Graph, user_line: Callable[[torch.fx.Node], str | None]) -> None:
    """Refuse products of tensors of different dtypes, as torch does when it runs them.

    Raises:
        RuntimeError: names the user's line and the dtypes.
    """
    for node in graph.nodes:
        operands = _OPERANDS.get(str(node.target)) if node.op == "call_function" else None
        if operands is None:
            continue
        values = [arg.meta["val"] for arg in node.args[operands] if isinstance(arg, torch.fx.Node)]
        dtypes = list(dict.fromkeys(value.dtype for value in values))
        if len(dtypes) > 1:
            raise RuntimeError(
                f"{user_line(node) or 'the step'}\n  expected the operands of {str(node.target).split('.')[1]} to have the same "
                f"dtype, but got {' and '.join(map(str, dtypes))}; convert one of them (x.to(layer.weight.dtype)), or choose the "
                "Trainer's precision"
            )
