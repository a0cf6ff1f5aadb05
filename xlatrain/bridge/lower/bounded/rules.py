"""The table of rules: which function computes which op on arrays that are larger than their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import torch

from xlatrain.bridge.lower.bounded.call import BoundedCall
from xlatrain.bridge.lower.registry import resolve


@dataclass(frozen=True)
class Rule:
    """How an op is computed.

    Attributes:
        compute: gives the results.
        sizes: the arguments in which numbers may change: sizes, of which it takes the graph's, or what it looks at.
        notes: it looks for indices out of range itself.
    """

    compute: Callable[[BoundedCall], Any]
    sizes: frozenset[str] = frozenset()
    notes: bool = False


_RULES: dict[Any, Rule] = {}
_F = TypeVar("_F", bound=Callable[[BoundedCall], Any])


def rule(*names: str, sizes: tuple[str, ...] = (), notes: bool = False) -> Callable[[_F], _F]:
    """Register the decorated function as the rule of the ops called ``names``; for the rest see :class:`Rule`."""

    def register(function: _F) -> _F:
        for name in names:
            if (op := resolve(name)) is not None:
                _RULES[op] = Rule(function, frozenset(sizes), notes)
        return function

    return register


_ALSO_POINTWISE = (torch.ops.aten._to_copy.default, torch.ops.aten.alias.default)

_BY_NUMBERS = {
    op
    for name in ("add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Tensor", "Scalar")
    if (op := resolve(f"aten.{name}.{overload}")) is not None
}


def compute(call: BoundedCall) -> Any:
    """The results of an op.

    Raises:
        LoweringError: it has no rule for what changes.
    """
    op: Any = call.node.target
    found = _RULES.get(op)
    if found is None and (torch.Tag.pointwise in op.tags or op in _ALSO_POINTWISE):
        found = Rule(_pointwise, frozenset(call.changing_names()))
    if found is None:
        raise call.refuse("it has no rule")
    if other := call.changing_names() - found.sizes:
        raise call.refuse(f"{', '.join(sorted(other))} changes, too")
    if not found.notes and call.is_checked:
        if call.changing_names():
            raise call.refuse("its indices are compared with a number that changes")
        args = list(call.args)
        for place in range(len(args)):
            call.mask_arg(place)
        call.note()
        call.args = args
    return found.compute(call)


def _pointwise(call: BoundedCall) -> Any:
    """Elements of the result are made of those at the same place."""
    call.refuse_broadcast(*call.node.all_input_nodes)
    if call.changing_names():
        if call.node.target not in _BY_NUMBERS:
            raise call.refuse("a number in it changes")
        call.refuse_rounding([x.dtype for x in call.args if isinstance(x, jax.Array)])
        call.with_true_numbers()
    return call.default()
