"""Functions of arrays that come later, as functions of the tensors of the graph that have the same numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.tensors.dtypes import numpy_dtype

Read = Callable[[Any], Any]


def _stacked(one: Any, read: Read) -> torch.Tensor | None:
    """A value, or a list of some, as a tensor."""
    if type(one) not in (list, tuple):
        return read(one)
    parts = [_stacked(part, read) for part in one]
    found = [part for part in parts if part is not None]
    return torch.stack(found) if parts and len(found) == len(parts) else None


def _joined(join: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor | None]:
    def joined(read: Read, parts: Any, axis: int = 0) -> torch.Tensor | None:
        tensors = [read(one) for one in parts]
        return None if any(one is None for one in tensors) else join(tensors, axis)

    return joined


def _each(function: Callable[..., Any]) -> Callable[..., torch.Tensor | None]:
    def each(read: Read, *args: Any) -> torch.Tensor | None:
        found = [one if type(one) in (bool, int, float) else read(one) for one in args]
        return None if any(one is None for one in found) else function(*found)

    return each


_FORMS: dict[Any, Callable[..., torch.Tensor | None]] = {
    np.array: lambda read, one: _stacked(one, read),
    np.asarray: lambda read, one: _stacked(one, read),
    np.stack: _joined(torch.stack),
    np.concatenate: _joined(torch.cat),
    np.transpose: _each(lambda x: x.permute(*reversed(range(x.ndim)))),
    **{one: _each(one) for one in (operator.neg, operator.add, operator.sub, operator.mul)},
    **{getattr(np, name): _each(getattr(operator, short)) for name, short in (("negative", "neg"), ("multiply", "mul"))},
}
"""NumPy's functions that change nothing, in terms of what ``read`` gives of their arguments."""


def changes_nothing(function: Any) -> bool:
    """Whether a function is known here, which leaves the arrays that it gets as they are."""
    return _is_hashable(function) and function in _FORMS


def form_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read, like: Any) -> torch.Tensor | None:
    """The tensor with the numbers of ``function(*args, **kwargs)``; None where that is not known.

    Args:
        read: the tensor with the numbers of an argument, or None.
        like: an array of the shape and type of the result.
    """
    if not changes_nothing(function) or not isinstance(like, np.ndarray):
        return None
    try:
        made = _FORMS[function](read, *args, **kwargs)
    except (TypeError, RuntimeError):  # options that NumPy alone has
        return None
    same = made is not None and numpy_dtype(made.dtype) == like.dtype and tuple(made.shape) == like.shape
    return made if same else None


def like_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Callable[[Any], Any]) -> Any:
    """An array of the shape and type of ``function(*args, **kwargs)``, or None; ``like`` gives such of an argument."""
    if not changes_nothing(function):
        return None
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    likes = [like(leaf) for leaf in leaves]
    if any(isinstance(one, torch.Tensor) or one is None for one in likes):
        return None
    args, kwargs = pytree.tree_unflatten(likes, spec)
    try:
        made = function(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    return made if isinstance(made, np.ndarray) else None


def _is_hashable(function: Any) -> bool:
    return getattr(type(function), "__hash__", None) is not None
