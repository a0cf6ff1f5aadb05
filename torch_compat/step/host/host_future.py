"""A value that a step's Python gets before it exists: the result of a host call.

Whatever is computed from it is deferred too (a further host call), and so is everything that it is logged to, stored in or
returned with. What needs the value at once, a branch above all, is refused with the user's file and line.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.calls import HostCalls, is_traced
from torch_compat.step.host.slots import ValueSlot

_KNOWN_ATTRIBUTES = frozenset({"shape", "dtype", "ndim", "device", "requires_grad", "is_cuda", "layout"})
_KNOWN_METHODS = frozenset({"dim", "numel", "size", "ndimension", "is_floating_point", "element_size", "nelement"})
_FIX = (
    "use the value in a hook such as on_train_batch_end, or compute with tensors (torch.where instead of if); values may be "
    "logged, printed, stored and returned in the step"
)


class HostFuture:
    """The result of a host call of the step that is being captured.

    Args:
        calls: the recorder.
        slot: which result.
        traced: the same value as a 0-d tensor of the graph, if it is one: what tensor arithmetic uses.
        like: any value of the same type and shape, where they are known: answers ``isinstance``, ``shape`` and ``len``.
    """

    __slots__ = ("_calls", "_like", "_slot", "_traced")
    comes_after_the_step = True

    def __init__(self, calls: HostCalls, slot: ValueSlot, traced: torch.Tensor | None = None, like: Any = None) -> None:
        self._calls = calls
        self._slot = slot
        self._traced = traced
        self._like = like

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return HostFuture if self._like is None else type(self._like)

    def slot(self) -> ValueSlot:
        """The slot of the value; from now on it counts as used."""
        self._calls.used.add(self._slot.index)
        return self._slot

    def tensor(self) -> torch.Tensor | None:
        """The value as a traced tensor, if there is one."""
        return self._traced

    def example(self) -> Any:
        """A value of the same type and shape, or None."""
        return self._like

    # -- derived values --------------------------------------------------------------------------------------------

    def _apply(self, function: Callable[..., Any], *args: Any, traced: bool = False, **kwargs: Any) -> HostFuture:
        """``function`` on the host; with ``traced`` in the graph as well, where all arguments are there."""
        slot = self._record(function, args, kwargs)
        both = None
        if traced and all(type(a) is not HostFuture or a._traced is not None for a in args):
            found = function(*(a._traced if type(a) is HostFuture else a for a in args))
            both = found if isinstance(found, torch.Tensor) else None
        likes = [a._like if type(a) is HostFuture else a for a in args]
        numbers = not kwargs and all(isinstance(like, int | float) for like in likes)
        return HostFuture(self._calls, slot, both, _number_like(function, likes) if numbers else None)

    def _record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> ValueSlot:
        if self._calls.closed:
            raise RuntimeError(
                "a value of a step that was being captured was kept in an object that compiled steps do not follow; keep it in "
                "an attribute, list or dict of the module or of a callback"
            )
        return self._calls.record(function, args, kwargs, text=getattr(function, "__name__", repr(function)))

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str | int):
            return self._apply(operator.getitem, self, key)
        like: Any = self._like
        part = like[key] if hasattr(like, "__getitem__") else None  # a KeyError or IndexError is the right answer
        return HostFuture(self._calls, self._slot.part("item", key), like=part)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        like = self._like
        if like is not None:
            known = getattr(like, name)  # an AttributeError is the right answer
            if name in _KNOWN_ATTRIBUTES or (name == "size" and isinstance(like, np.ndarray)):
                return known
            if name in _KNOWN_METHODS and isinstance(like, torch.Tensor):
                return known
        return HostFuture(self._calls, self._slot.part("attr", name))

    def __call__(self, *args: Any, **kwargs: Any) -> HostFuture:
        return self._apply(_call, self, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs or {}))
        deferred = [leaf for leaf in leaves if type(leaf) is HostFuture]
        if all(one._traced is not None for one in deferred):
            like = next((leaf for leaf in leaves if issubclass(type(leaf), torch.Tensor)), None)
            args, kwargs = pytree.tree_unflatten([_graph_value(leaf, like) for leaf in leaves], spec)
            return func(*args, **kwargs)
        if _writes(func, kwargs) and any(is_traced(leaf) for leaf in leaves if type(leaf) is not HostFuture):
            raise deferred[0].refusal("a value that is computed on the host is written into a tensor of the step")
        return deferred[0]._apply(func, *args, **(kwargs or {}))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> HostFuture:
        return self._apply(func, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> HostFuture:
        return self._apply(getattr(ufunc, method), *args, **kwargs)

    # -- what needs the value --------------------------------------------------------------------------------------

    def refusal(self, reason: str, *, at_origin: bool = False) -> Exception:
        """The error for a use that needs the value during the step, here or, with ``at_origin``, where the value comes from."""
        return self._calls.refuse(reason, _FIX, self._calls.calls[self._slot.index].where if at_origin else None)

    def _refuse_as(self, use: str) -> NoReturn:
        raise self.refusal(
            f"{use} needs the value of a tensor or of a host call (.item(), .numpy(), a torchmetrics result), which exists only "
            "after the step has run"
        )

    def __bool__(self) -> bool:
        self._refuse_as("a Python branch (if, and, or, max, in …)")

    def __index__(self) -> int:
        self._refuse_as("an index or range()")

    def __int__(self) -> int:
        self._refuse_as("int()")

    def __float__(self) -> float:
        self._refuse_as("float()")

    def __complex__(self) -> complex:
        self._refuse_as("complex()")

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._refuse_as("a conversion to numpy")

    def __hash__(self) -> int:
        self._refuse_as("a key of a dict or set")

    def __len__(self) -> int:
        if self._like is None:
            self._refuse_as("len()")
        return len(self._like)

    def __iter__(self) -> Iterator[Any]:
        if self._like is None:
            self._refuse_as("a loop")
        if isinstance(self._like, dict):
            return iter(self._like)
        return (self[index] for index in range(len(self._like)))

    def __contains__(self, key: Any) -> bool:
        if not isinstance(self._like, dict):
            self._refuse_as("in")
        return key in self._like

    def __format__(self, specification: str) -> str:
        return self._calls.marker(self.slot(), specification)

    def __str__(self) -> str:
        return self._calls.marker(self.slot(), None)

    def __repr__(self) -> str:
        return str(self)

    def __enter__(self) -> Any:
        self._refuse_as("a with block")

    def __exit__(self, *_: Any) -> None:
        """Never reached."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_as("a copy or pickle")

    def __deepcopy__(self, memo: Any) -> HostFuture:
        return self


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _binary(function: Callable[[Any, Any], Any], *, swap: bool = False) -> Any:
    def method(self: HostFuture, other: Any) -> Any:
        if issubclass(type(other), torch.Tensor):
            args = (other, self) if swap else (self, other)
            return HostFuture.__torch_function__(function, (), args)
        return self._apply(function, other, self, traced=True) if swap else self._apply(function, self, other, traced=True)

    return method


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self, *args: self._apply(function, self, *args, traced=function in (operator.neg, operator.pos, abs))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(HostFuture, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(HostFuture, f"__r{_name}__", _binary(getattr(operator, _name), swap=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(HostFuture, f"__{_name}__", _binary(getattr(operator, _name)))
for _function in (operator.neg, operator.pos, operator.invert, abs, round):
    setattr(HostFuture, f"__{_function.__name__.strip('_')}__", _unary(_function))


def _graph_value(leaf: Any, like: torch.Tensor | None) -> Any:
    """A deferred number as a traced scalar, with the dtype that a Python number would take beside ``like``."""
    if type(leaf) is not HostFuture:
        return leaf
    traced = leaf._traced
    assert traced is not None
    if like is not None and (like.is_floating_point() or like.is_complex()):
        return traced.to(like.dtype)
    return traced


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether a torch function changes one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))
    return in_place or name in ("__setitem__", "copy_", "__set__") or bool(kwargs and kwargs.get("out") is not None)


def _number_like(function: Callable[..., Any], likes: list[Any]) -> Any:
    """An example number of the type that ``function`` returns; None if it cannot be told."""
    ones = [type(like)(1) for like in likes]
    try:
        return function(*ones)
    except (TypeError, ValueError, ArithmeticError):
        return None
