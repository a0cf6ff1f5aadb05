"""Rules of what torch's functions do with :class:`MaskedRows`: how they are registered, and what they ask of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from xlatrain.bridge.capture.masked_rows.masked_rows import RULES, MaskedRows, Rule

_OWNERS = (torch, torch.Tensor, F, torch.special, torch.linalg)


def rule_of(names: str, owners: Iterable[Any] = _OWNERS) -> Callable[[Rule], Rule]:
    """The rule of all functions of these names."""

    def register(rule: Rule) -> Rule:
        for owner in owners:
            for name in names.split():
                if (function := getattr(owner, name, None)) is not None:
                    RULES[function] = rule
        return rule

    return register


def found_in(value: Any) -> Iterator[MaskedRows]:
    if type(value) is MaskedRows:
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from found_in(one)
    elif type(value) is dict:
        yield from found_in(list(value.values()))


def all_rows(value: Any) -> Any:
    """``value`` with all rows in place of those selected."""
    if type(value) is MaskedRows:
        return value.rows
    if type(value) in (list, tuple):
        return type(value)(map(all_rows, value))
    return {key: all_rows(one) for key, one in value.items()} if type(value) is dict else value


def together(*values: Any) -> MaskedRows | None:
    """Any of the selected rows in arguments; None where not all are selected by one mask."""
    first, *others = found_in(values)
    return first if all(one.is_beside(first) for one in others) else None


def goes_beside(x: MaskedRows, value: Any) -> bool:
    """Whether an operand of an op on selected rows has these rows too, or none of its own."""
    behind = x.rows.ndim - x.axis
    if type(value) is MaskedRows:
        return value.is_beside(x) and value.rows.ndim - value.axis == behind
    return not isinstance(value, torch.Tensor) or value.ndim < behind or value.shape[-behind] == 1


def dims_of(args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int, place: int = 1, default: Any = None) -> list[int] | None:
    """The dims that a function is given, counted from the first; None: it is given none."""
    given = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
    if given is None or type(given) is bool:
        return None
    return [int(one) % ndim for one in (given if isinstance(given, list | tuple | torch.Size) else [given])]


def put_in(result: Any, values: list[Any]) -> Any:
    """Values in a container of the kind of ``result``."""
    return type(result)(values)


def extreme(x: MaskedRows, *, largest: bool) -> float | int:
    if x.rows.dtype.is_floating_point:
        return math.inf if largest else -math.inf
    if x.rows.dtype == torch.bool:
        return largest
    limits = torch.iinfo(x.rows.dtype)
    return limits.max if largest else limits.min
