"""``torch._foreach_*`` ops: each is the op of its name, applied to lists of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

PREFIX = "aten::_foreach_"
"""The beginning of the names of ops of lists of tensors."""


def _norm(x: torch.Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


def _powsum(x: torch.Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.sum(torch.abs(x) ** ord, dtype=dtype)


def _addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> torch.Tensor:
    return x + value * (a / b)


def _addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, value: Any = 1) -> torch.Tensor:
    return x + value * (a * b)


def _scaled(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A decomposition of add or sub, whose overloads with numbers have no ``alpha``."""

    def apply(x: torch.Tensor, other: Any, alpha: float = 1) -> torch.Tensor:
        return op(x, other) if alpha == 1 else op(x, other, alpha=alpha)

    return apply


def _extremum(of_tensors: Callable[..., torch.Tensor], bound: str) -> Callable[..., torch.Tensor]:
    """maximum and minimum, which for one tensor and a number are a clamp."""

    def apply(x: torch.Tensor, other: Any) -> torch.Tensor:
        return of_tensors(x, other) if isinstance(other, torch.Tensor) else torch.clamp(x, **{bound: other})

    return apply


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return source.to(x.dtype, copy=True).expand_as(x)


_SPECIAL: dict[str, Callable[..., torch.Tensor]] = {
    "norm": _norm,
    "powsum": _powsum,
    "max": torch.amax,
    "copy": _copy,
    "zero": torch.zeros_like,
    "addcdiv": _addcdiv,
    "addcmul": _addcmul,
    "add": _scaled(torch.add),
    "sub": _scaled(torch.sub),
    "maximum": _extremum(torch.maximum, "min"),
    "minimum": _extremum(torch.minimum, "max"),
}


def _each(function: Callable[..., torch.Tensor], per_tensor: tuple[bool, ...], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """``function`` for each index of the list arguments (``per_tensor``); other arguments are the same for all."""
    lists = [is_list for is_list, _ in zip(per_tensor, args, strict=False)]
    count = len(args[lists.index(True)])
    return [
        function(*(arg[i] if is_list else arg for is_list, arg in zip(lists, args, strict=True)), **kwargs) for i in range(count)
    ]


def foreach_decompositions() -> dict[torch._ops.OpOverload, Callable[..., list[torch.Tensor]]]:
    """A decomposition for every functional ``_foreach_*`` op of this torch."""
    table: dict[torch._ops.OpOverload, Callable[..., list[torch.Tensor]]] = {}
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith(PREFIX)}
    for name in sorted(names):
        op = name.removeprefix(PREFIX)
        function = _SPECIAL.get(op) or getattr(torch, op, None)
        if op.endswith("_") or function is None:
            continue
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
        for overload in (getattr(packet, overload) for overload in packet.overloads()):
            arguments = overload._schema.arguments
            if any(argument.is_out for argument in arguments):
                continue
            # the one tensor of factors in addcmul.Tensor and addcdiv.Tensor has an element for each of the lists'
            per_tensor = tuple(
                isinstance(argument.type, torch.ListType) or argument.name == "scalars"
                for argument in arguments
                if not argument.kwarg_only
            )
            table[overload] = functools.partial(_each, function, per_tensor)
    return table
