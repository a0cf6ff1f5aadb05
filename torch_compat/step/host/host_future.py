"""A value that a step's Python gets before it exists: the result of a host call.

Whatever is computed from it is deferred too (a further host call), and so is everything that it is logged to, stored in or
returned with.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host import whole_numbers
from torch_compat.step.host.array_forms import like_of
from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.factors import for_each, is_of_lists, multiplied
from torch_compat.step.host.host_memory import may_view
from torch_compat.step.host.known import known_result
from torch_compat.step.host.later_functions import (
    IN_GRAPH,
    JUMPS,
    bound_of_result,
    computed,
    graph_value,
    known_operand,
    later_of,
    number_like,
    numbers_compared,
)
from torch_compat.step.host.later_value import PURE, LaterValue, call
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.host.slots import ValueSlot
from torch_compat.step.host.whole_numbers import NARROW

_OF_ARRAYS = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "pow", "matmul", "__floordiv__")},
    "div": operator.truediv,
    "remainder": operator.mod,
}
"""Methods of tensors that refuse arrays, which their operators take: torch's first, then NumPy's."""
_FORMS_OF_AN_ARRAY = ("tolist", "copy", "T")
_KNOWN_ATTRIBUTES = frozenset({"shape", "dtype", "ndim", "device", "requires_grad", "is_cuda", "layout"})
_KNOWN_METHODS = frozenset({"dim", "numel", "size", "ndimension", "is_floating_point", "element_size", "nelement"})
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv)
"""Of numbers of this step and others, such as those of earlier steps, it is in the graph where somebody wants it there."""


class HostFuture(LaterValue):
    """The result of a host call of the step that is being captured."""

    __slots__ = ()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return HostFuture if self._like is None else type(self._like)

    def looked_at(self, function: Callable[[Any], Any]) -> HostFuture:
        """``function`` of it, a look at whether it is finite."""
        return self._apply(function, self, traced=True)

    def as_count(self) -> HostFuture:
        """The number as one that is often 0: before Python divides by it, the program looks."""
        self._counts = True
        return self

    def may_divide(self) -> None:
        """Assume that the number is not 0, where it is a count.

        Raises:
            ZeroDivisionError: it is, as a program has found.
        """
        if self._counts and self.stays_a_number() and self == 0:
            raise ZeroDivisionError("division by zero")

    def as_float(self) -> HostFuture:
        """The number as ``float()`` gives it."""
        if type(self._like) is float:
            return self
        made = self._apply(float, self, traced=True)
        made._like = 0.0
        return made

    # -- derived values --------------------------------------------------------------------------------------------

    def _note_memory(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slot: ValueSlot) -> None:
        """Note what a call does to the memory of arrays that tensors have, too."""
        shared = self._calls.memory
        if args and type(args[0]) is HostFuture:
            given = args[0]._slot
            if may_view(function, str(given.path[-1][1]) if function is call and given.path else ""):
                shared.views(slot.index, given.index)
        for one in pytree.tree_leaves(kwargs.get("out")):
            if type(one) is HostFuture:
                shared.changes(one._slot.index)

    def _apply(self, function: Callable[..., Any], *args: Any, traced: bool = False, **kwargs: Any) -> Any:
        """``function`` on the host; with ``traced`` in the graph as well, where all arguments are there."""
        known = None if kwargs else known_result(function, args, known_operand)
        if known is None and self._known is not None and (kwargs or function is call):
            self._known.changed.append(getattr(function, "__name__", "a call"))
        slot = self._record(function, args, kwargs, pure=known is not None)
        self._note_memory(function, args, kwargs, slot)
        both: Any = None
        deferred = [a for a in args if type(a) is HostFuture]
        likes = [a._like if type(a) is HostFuture else a for a in args]
        if function in JUMPS and any(isinstance(like, float) for like in likes):
            traced = False
        bound = bound_of_result(function, args, likes)
        if bound is None and function in whole_numbers.OF_RIGHT_ONES and all(one._is_small() for one in deferred):
            bound = NARROW  # a place in a queue: (start + 16) % 64
        if bound is None:
            traced = False
        if traced and all((one._computes is not None or one._made is not None) and not one._compared for one in deferred):
            both = functools.partial(computed, function, args)
            of_others = any(type(a) in (float, HostScalar) for a in args) or any(one._computes for one in deferred)
            if function not in _ARITHMETIC or not of_others:
                both = both()
        numbers = not kwargs and all(isinstance(like, int | float) for like in likes)
        like = number_like(function, likes) if numbers else _copied(likes) if function is call and not kwargs else None
        if like is None and not numbers and (like := like_of(function, args, kwargs, _like_of)) is not None:
            self._calls.likes[slot.index] = like
        compared = None if both is None or known is not None else numbers_compared(function, args, slot)
        later = later_of(function, args, kwargs) if both is None and known is None else None
        if both is None and numbers and known is not None and known.drawn and self._calls.asked is not None:
            return self._calls.asked.number(known.of, known.text)
        made = HostFuture(self._calls, slot, both, like, known, compared, later)
        if both is not None and bound is not None:
            made._top = bound
            made._whole = (function, args) if bound > NARROW else None
        return made.as_count() if any(type(a) is HostFuture and a._counts for a in args) else made

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str | int):
            return self._apply(operator.getitem, self, key)
        like: Any = self._like
        part = like[key] if hasattr(like, "__getitem__") else None  # a KeyError or IndexError is the right answer
        known = self._known and self._known.then(operator.itemgetter(key), f"entry {key!r}")
        whole = self._later
        later = None if whole is None else lambda: None if (made := whole()) is None else made[key]
        made = HostFuture(self._calls, self._slot.part("item", key), like=part, known=known, later=later)
        if known is None and whole is None and isinstance(part, np.integer):
            made._computes = functools.partial(made._read, made._slot.index, made._slot.path)
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "backward" and self._later is not None and (made := self.in_graph()) is not None:
            return made.backward
        like = self._like
        if like is not None:
            known = getattr(like, name)  # an AttributeError is the right answer
            if name in _KNOWN_ATTRIBUTES or (name == "size" and isinstance(like, np.ndarray)):
                return known
            if name in _KNOWN_METHODS and isinstance(like, torch.Tensor):
                return known
        known = self._known and self._known.then(operator.attrgetter(name), name)
        if self._known is not None and name not in PURE:
            self._known.changed.append(name)
        if name in _CHANGING:
            self._calls.memory.changes(self._slot.index)
        part = getattr(like, name) if isinstance(like, np.ndarray) and name in _FORMS_OF_AN_ARRAY else None
        return HostFuture(self._calls, self._slot.part("attr", name), like=part, known=known)

    def given_to(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function``, which has no result but its value, of arguments in which it is."""
        return self._apply(function, *args, **kwargs)

    def text_by(self, function: Callable[..., str], *before: Any) -> str:
        """The text that stands for ``function(*before, value)`` until the value is there."""
        return self._calls.marker(self._apply(function, *before, self).slot(), None)

    def call_later(self, function: Callable[..., Any], *args: Any, text: str) -> None:
        """Have ``function`` called when the step has run, with what the arguments are then."""
        slot = self._calls.record(function, args, text=text, state=None)
        self._calls.used.add(slot.index)

    def __call__(self, *args: Any, **kwargs: Any) -> HostFuture:
        return self._apply(call, self, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs or {}))
        deferred = [leaf for leaf in leaves if type(leaf) is HostFuture]
        if any(one._compared for one in deferred):  # in the precision of Python, which a graph does not have
            decided = [bool(leaf) if type(leaf) is HostFuture and leaf._compared else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(decided, spec)
            return func(*args, **kwargs)
        if is_of_lists(func) and any(map(is_traced, leaves)):
            with contextlib.suppress(TypeError):
                return for_each(func, args, kwargs or {})
        if all(one._traced is not None for one in deferred):
            like = next((leaf for leaf in leaves if issubclass(type(leaf), torch.Tensor)), None)
            args, kwargs = multiplied(func, *pytree.tree_unflatten([graph_value(leaf, like) for leaf in leaves], spec))
            return func(*args, **kwargs)
        if all(one._traced is not None or one._known is not None for one in deferred) and any(map(is_traced, leaves)):
            exact = [leaf._exact("a tensor op") if type(leaf) is HostFuture else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(exact, spec)
            return func(*args, **kwargs)
        if any(map(is_traced, leaves)):
            made = [leaf.in_graph() if type(leaf) is HostFuture else leaf for leaf in leaves]
            if not any(value is None and type(leaf) is HostFuture for value, leaf in zip(made, leaves, strict=True)):
                args, kwargs = pytree.tree_unflatten(made, spec)
                return func(*args, **kwargs)
        if _writes(func, kwargs) and any(is_traced(leaf) for leaf in leaves if type(leaf) is not HostFuture):
            raise deferred[0].refusal("a value that is computed on the host is written into a tensor of the step")
        if not kwargs and len(args) == 2 and isinstance(args[1], np.ndarray):
            func = _OF_ARRAYS.get(getattr(func, "__name__", ""), func)
        return deferred[0]._apply(func, *args, **(kwargs or {}))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> HostFuture:
        return self._apply(func, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> HostFuture:
        if method == "__call__" and not kwargs and ufunc in IN_GRAPH:
            return self.looked_at(ufunc)
        return self._apply(getattr(ufunc, method), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        if self._like is None:
            return iter(self._exact("a loop"))
        if isinstance(self._like, dict):
            return iter(self._like)
        return (self[index] for index in range(len(self._like)))

    def __contains__(self, key: Any) -> bool:
        if not isinstance(self._like, dict):
            return key in self._exact("in")
        return key in self._like

    def __format__(self, specification: str) -> str:
        return self._calls.marker(self.slot(), specification)

    def __str__(self) -> str:
        return self._calls.marker(self.slot(), None)

    def __repr__(self) -> str:
        return str(self)

    def __deepcopy__(self, memo: Any) -> HostFuture:
        return self


def _like_of(one: Any) -> Any:
    return one.example() if type(one) is HostFuture else one


def _copied(likes: list[Any]) -> Any:
    """The result of ``array.tolist()`` or ``array.copy()``, of an array of the same shape."""
    is_copy = len(likes) == 1 and getattr(likes[0], "__name__", "") in ("tolist", "copy")
    return likes[0]() if is_copy and isinstance(getattr(likes[0], "__self__", None), np.ndarray) else None


def _binary(function: Callable[[Any, Any], Any], *, swap: bool = False) -> Any:
    def method(self: HostFuture, other: Any) -> Any:
        if issubclass(type(other), torch.Tensor):
            args = (other, self) if swap else (self, other)
            return HostFuture.__torch_function__(function, (), args)
        divisor = self if swap else other
        if function in _DIVISIONS and type(divisor) is HostFuture:
            divisor.may_divide()
        return self._apply(function, other, self, traced=True) if swap else self._apply(function, self, other, traced=True)

    return method


def _in_place(function: Callable[[Any, Any], Any]) -> Any:
    """An operator like ``+=``, which changes an array or a list itself."""

    def method(self: HostFuture, other: Any) -> Any:
        may_be_array = self._like is None and self._made is None and self._computes is None and self._later is None
        if not (isinstance(self._like, np.ndarray | list) or may_be_array):
            return NotImplemented
        if self._slot.index in self._calls.read:
            raise self.refusal("an array whose memory a tensor may have is changed in place")
        self._calls.memory.changes(self._slot.index)
        made = self._apply(function, self, other)
        made.slot()  # others may have the array
        return made

    return method


_CHANGING = frozenset({"sort", "partition", "fill", "put", "resize", "byteswap"})
"""Methods of an array that change it."""
_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda self, *args: self._apply(function, self, *args, traced=function in (operator.neg, operator.pos, abs))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(HostFuture, f"__{_name}__", _binary(getattr(operator, _name)))
    setattr(HostFuture, f"__r{_name}__", _binary(getattr(operator, _name), swap=True))
    setattr(HostFuture, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(HostFuture, f"__{_name}__", _binary(getattr(operator, _name)))
for _function in (operator.neg, operator.pos, operator.invert, abs, round):
    setattr(HostFuture, f"__{_function.__name__.strip('_')}__", _unary(_function))


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether a torch function changes one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))
    return in_place or name in ("__setitem__", "copy_", "__set__") or bool(kwargs and kwargs.get("out") is not None)
