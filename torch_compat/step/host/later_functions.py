"""Functions of values that come after the step: what they are in the graph, and what is known of their results."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host import whole_numbers
from torch_compat.step.host.assumptions import Compared
from torch_compat.step.host.known import Known
from torch_compat.step.host.later_value import WHOLE, LaterValue, call
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.host.slots import ValueSlot
from torch_compat.step.host.whole_numbers import NARROW, bound_of

IN_GRAPH: dict[Any, Callable[..., Any]] = {
    **{getattr(owner, name): getattr(torch, name) for owner in (math, np) for name in ("isnan", "isinf", "isfinite")},
    float: lambda tensor: tensor.detach().to(torch.get_default_dtype()),
}
"""Functions of Python numbers, and what they are on tensors."""
JUMPS = (operator.floordiv, operator.mod)
"""Of fractions they jump where these round: in the precision of Python elsewhere than in a graph's."""
_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


def is_later(value: Any) -> bool:
    """Whether it is a value that comes after the step; it tells ``isinstance`` that it is another."""
    return issubclass(type(value), LaterValue)


def computed(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``function`` in the graph; None where that gives no tensor."""
    take = _number_of if function not in whole_numbers.FUNCTIONS or any(map(_is_fraction, args)) else _as_it_is
    found = IN_GRAPH.get(function, function)(*(take(a) if is_later(a) or type(a) is int else a for a in args))
    return found if isinstance(found, torch.Tensor) else None


def known_operand(arg: Any) -> Known | None:
    """Knowledge of an operand before the step; None where there is none."""
    if type(arg) is HostScalar:
        return Known(*arg.deferred())
    return arg._known if is_later(arg) else None


def numbers_compared(function: Callable[..., Any], args: tuple[Any, ...], slot: ValueSlot) -> Compared | None:
    """The numbers that ``function`` compares, where the graph has them in less precision than Python."""
    if function not in _COMPARISONS:
        return None
    left, right = (_number_of(arg) for arg in args)
    if not any(one.is_floating_point() if isinstance(one, torch.Tensor) else isinstance(one, float) for one in (left, right)):
        return None
    return Compared(left, right, slot)


def _number_of(arg: Any) -> torch.Tensor | float:
    """An operand as a 0-d tensor of the graph, or the number that it is."""
    if is_later(arg):
        return arg.fraction()
    if type(arg) is int and abs(arg) > WHOLE:
        return float(arg)
    return arg.tensor() if type(arg) is HostScalar else arg


def _as_it_is(arg: Any) -> Any:
    return arg._traced if is_later(arg) else arg


def bound_of_result(function: Callable[..., Any], args: tuple[Any, ...], likes: Sequence[Any]) -> float | None:
    """See :func:`~torch_compat.step.host.whole_numbers.bound_of`; that of a tensor where this is no function of whole numbers."""
    if function not in whole_numbers.FUNCTIONS or not all(type(like) is int for like in likes):
        return NARROW
    if function is operator.pow and type(args[1]) is not int:
        return None
    return bound_of(function, [float(abs(a)) if type(a) is int else a._top if is_later(a) else NARROW for a in args])


def _is_fraction(arg: Any) -> bool:
    return isinstance(arg._like if is_later(arg) else arg, float)


def later_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Computes a function of deferred values in the graph; None where the host alone has one of them."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    deferred = [leaf for leaf in leaves if is_later(leaf)]
    if (
        function is call
        or not any(one._later or one._compared for one in deferred)
        or any(type(leaf) is HostScalar for leaf in leaves)
    ):
        return None

    @functools.cache
    def later() -> Any:
        values = [leaf.in_graph() if is_later(leaf) else leaf for leaf in leaves]
        if any(value is None and is_later(leaf) for value, leaf in zip(values, leaves, strict=True)):
            return None
        args, kwargs = pytree.tree_unflatten(values, spec)
        return IN_GRAPH.get(function, function)(*args, **kwargs)

    return later


def graph_value(leaf: Any, like: torch.Tensor | None) -> Any:
    """A deferred number as a traced scalar, with the dtype that a Python number would take beside ``like``."""
    if not is_later(leaf):
        return leaf
    traced = leaf._traced
    assert traced is not None
    if like is not None and (like.is_floating_point() or like.is_complex()):
        return leaf.fraction().to(like.dtype)
    if not leaf._is_small():
        leaf._refuse_as("a whole number that may have more than 32 bits")
    return traced


def number_like(function: Callable[..., Any], likes: list[Any]) -> Any:
    """An example number of the type that ``function`` returns; None if it cannot be told."""
    ones = [like.__class__(1) for like in likes]  # a counter passes for a number
    try:
        return function(*ones)
    except (TypeError, ValueError, ArithmeticError):
        return None
