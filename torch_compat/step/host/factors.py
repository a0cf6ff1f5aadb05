"""Calls of torch with a tensor where it takes numbers alone: ``p.add_(g, alpha=lr)``, ``torch._foreach_mul_(ps, decay)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xlatrain.bridge.capture.decompositions.foreach import PREFIX

_FACTORS = {
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract", "subtract_"), ("alpha", "other")),
    **dict.fromkeys(("addcmul", "addcmul_", "addcdiv", "addcdiv_"), ("value", "tensor1")),
}
"""The factors of functions, and the operands that these multiply, which are their second arguments."""
_FOREACH = PREFIX.removeprefix("aten::")
_NUMBERS = ("scalar", "scalars")
_EXTREMA = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""What these are of a tensor and a number."""


def multiplied(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a factor that is a tensor multiplied in."""
    factor, operand = _FACTORS.get(getattr(func, "__name__", ""), ("", ""))
    if not isinstance(kwargs.get(factor), torch.Tensor):
        return args, kwargs
    kwargs = dict(kwargs)
    number = kwargs.pop(factor)
    if operand in kwargs:
        return args, {**kwargs, operand: kwargs[operand] * number}
    return (*args[:1], args[1] * number, *args[2:]), kwargs


def is_of_lists(func: Callable[..., Any]) -> bool:
    """Whether it is a function of lists of tensors, ``torch._foreach_add`` and its like."""
    return getattr(func, "__name__", "").startswith(_FOREACH)


def for_each(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Call such a function as calls of the one of a single tensor, which knows what to do with a number that is none."""
    name = func.__name__.removeprefix(_FOREACH)
    in_place = name.endswith("_")
    args = (*args, *(kwargs[one] for one in _NUMBERS if one in kwargs))
    kwargs = {one: value for one, value in kwargs.items() if one not in _NUMBERS}
    if name.startswith("addc") and len(args) == 4:  # of one tensor the number has a name
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    made = [
        getattr(torch.Tensor, _of_one(name.removesuffix("_"), one) + "_" * in_place)(*one, **named)
        for one, named in _entries(args, kwargs)
    ]
    return None if in_place else made


def _entries(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    count = next(len(one) for one in (*args, *kwargs.values()) if isinstance(one, list | tuple))
    for place in range(count):
        yield (
            [one[place] if isinstance(one, list | tuple) else one for one in args],
            {name: one[place] if isinstance(one, list | tuple) else one for name, one in kwargs.items()},
        )


def _of_one(name: str, args: list[Any]) -> str:
    return name if isinstance(args[-1], torch.Tensor) else _EXTREMA.get(name, name)
