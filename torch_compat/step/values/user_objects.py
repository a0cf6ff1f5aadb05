"""Objects of the user's, whose attributes and contents may be state of a step."""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from torch_compat.step.values import policy
from xlatrain.bridge.errors import is_user_file

_IMMUTABLE_TYPE = 1 << 8


def attribute_of(value: Any, name: str) -> Any:
    """``getattr(value, name, None)``, whatever else the object raises: a proxy of nothing yet, a class that is not complete."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object that has one and shows it."""
    found = attribute_of(value, "__dict__")
    return found if isinstance(found, dict) else None


def is_user_object(value: Any) -> bool:
    """Whether ``value`` is an object of a class of the user's own, so that its attributes may be state of the step."""
    return attributes_of(value) is not None and is_user_class(type(value))


def may_be_followed(value: Any) -> bool:
    """Whether an :class:`~torch_compat.step.effects.recorder.EffectRecorder` can have ``value`` as a root."""
    noticed = not type(value).__flags__ & _IMMUTABLE_TYPE  # reads of its attributes can be
    return isinstance(value, list | dict | set | deque) or (noticed and attributes_of(value) is not None)


@functools.cache
def is_user_class(kind: type) -> bool:
    """Whether ``kind`` is a class of the user's own: written in one of their files, or made to hold what one likes."""
    if kind in (types.SimpleNamespace, argparse.Namespace):
        return True
    if issubclass(kind, type | types.FunctionType | types.ModuleType | torch.Tensor | torch.utils.data.Dataset):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" if file is None else is_user_file(file)  # a notebook's __main__ has no file


def containers_around(objects: Iterable[Any]) -> dict[str, Any]:
    """Name → list, dict, set or deque that methods of ``objects`` reach in their module or closure."""
    found: dict[str, Any] = {}
    for kind in {kind for one in objects for kind in type(one).__mro__ if is_user_class(kind)}:
        outside = {f"{kind.__module__}.{name}": value for name, value in vars(sys.modules[kind.__module__]).items()}
        for function in vars(kind).values():
            if isinstance(function, types.FunctionType) and function.__closure__:
                cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
                outside.update({f"{kind.__qualname__}: {name}": cell.cell_contents for name, cell in cells if _is_filled(cell)})
        found.update({name: value for name, value in outside.items() if _is_collection(value) and ".__" not in name})
    return found


def objects_around(value: Any) -> dict[str, Any]:
    """Name → what code of the user's class of ``value`` can change: containers around it, its own, and objects in closures."""
    found = containers_around([value])
    for kind in filter(is_user_class, type(value).__mro__):
        functions = [inspect.unwrap(one) for one in vars(kind).values() if isinstance(one, types.FunctionType)]
        for function in functions:  # torch wraps the step of an optimizer
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            held = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
            inside = (torch.nn.Module, list, dict, set, deque)
            found |= {name: one for name, one in held.items() if isinstance(one, inside) or is_user_object(one)}
    return {**found, **{f"self.{name}": one for name, one in vars(value).items() if _is_collection(one)}}


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_collection(value: Any) -> bool:
    return isinstance(value, list | dict | set | deque) and len(value) <= policy.MOST
