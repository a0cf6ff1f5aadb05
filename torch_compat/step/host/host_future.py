"""A value that a step's Python gets before it exists: the result of a host call.

Whatever is computed from it is deferred too (a further host call), and so is everything that it is logged to, stored in or
returned with. What needs the value at once, a branch above all, is refused with the user's file and line; unless it is known
before the step, as what depends on the batch alone: then what the branch saw is a guard.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host import whole_numbers
from torch_compat.step.host.assumptions import Compared
from torch_compat.step.host.calls import HostCalls, is_traced
from torch_compat.step.host.factors import for_each, is_of_lists, multiplied
from torch_compat.step.host.known import Known, known_result
from torch_compat.step.host.offsets import Offset
from torch_compat.step.host.scalar_plan import Expression
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.host.slots import ValueSlot
from torch_compat.step.host.whole_numbers import NARROW, SAFE, bound_of
from xlatrain.bridge.capture.cut import UnknownValueError
from xlatrain.bridge.errors import is_user_file

_WHOLE = 2**31 - 128  # fractions below it have a whole number of 32 bits
_NOT_WHOLE = -_WHOLE
_OF_ARRAYS = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "pow", "matmul", "__floordiv__")},
    "div": operator.truediv,
    "remainder": operator.mod,
}
"""Methods of tensors that refuse arrays, which their operators take: torch's first, then NumPy's."""
_PURE = frozenset(
    {
        *("all", "any", "argmax", "argmin", "argsort", "astype", "copy", "count", "cumsum", "flatten", "index", "item", "max"),
        *("mean", "min", "nonzero", "prod", "ravel", "repeat", "reshape", "round", "squeeze", "std", "sum", "T", "tolist"),
        *("transpose", "var"),
    }
)
"""Methods and attributes of numbers, lists and arrays that change nothing."""
_KNOWN_ATTRIBUTES = frozenset({"shape", "dtype", "ndim", "device", "requires_grad", "is_cuda", "layout"})
_KNOWN_METHODS = frozenset({"dim", "numel", "size", "ndimension", "is_floating_point", "element_size", "nelement"})
_FIX = (
    "use the value in a hook such as on_train_batch_end, or compute with tensors (torch.where instead of if); values may be "
    "logged, printed, stored and returned in the step"
)


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv)
"""Of numbers of this step and others, such as those of earlier steps, it is in the graph where somebody wants it there."""


class HostFuture:
    """The result of a host call of the step that is being captured.

    Args:
        calls: the recorder.
        slot: which result.
        traced: the same value as a 0-d tensor of the graph, if it is one: what tensor arithmetic uses; or the function that
            computes it, where somebody wants it.
        like: any value of the same type and shape, where they are known: answers ``isinstance``, ``shape`` and ``len``.
        known: where it is known before the step.
        compared: the traced numbers whose comparison it is.
        later: computes the same value in the graph, where the step computes with it; None from it: that cannot be.
    """

    __slots__ = ("_calls", "_compared", "_computes", "_counts", "_known", "_later", "_like", "_made", "_slot", "_top", "_whole")
    comes_after_the_step = True

    def __init__(
        self,
        calls: HostCalls,
        slot: ValueSlot,
        traced: torch.Tensor | Callable[[], torch.Tensor] | None = None,
        like: Any = None,
        known: Known | None = None,
        compared: Compared | None = None,
        later: Callable[[], Any] | None = None,
    ) -> None:
        self._calls = calls
        self._compared = compared
        self._known = known
        self._slot = slot
        self._made, self._computes = (traced, None) if isinstance(traced, torch.Tensor) else (None, traced)
        self._like = like
        self._later = later
        self._counts = False
        self._whole: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._top = NARROW  # no larger it is, where it is a whole number

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return HostFuture if self._like is None else type(self._like)

    def slot(self) -> ValueSlot:
        """The slot of the value; from now on it counts as used."""
        self._calls.used.add(self._slot.index)
        return self._slot

    @property
    def _traced(self) -> torch.Tensor | None:
        if self._computes is not None:
            self._made, self._computes = self._computes(), None
        return self._made

    def tensor(self, *, made: bool = False) -> torch.Tensor | None:
        """The value as a traced tensor, if there is one; ``made``: if it has been computed. Comparisons are the host's."""
        return None if self._compared else self._made if made else self._traced

    def is_wide(self) -> bool:
        """Whether it is a whole number that was computed, for which the graph may not have bits enough."""
        return self._whole is not None

    def fraction(self) -> torch.Tensor:
        """The number in the graph; one that may not have bits enough there as a fraction, which is as large as in Python."""
        assert self._traced is not None
        if self._whole is None:
            return self._traced
        large = self._large()
        return torch.where(large.abs() < SAFE, self._traced.to(large.dtype), large)

    def _large(self) -> torch.Tensor:
        if self._whole is None:
            assert self._traced is not None
            return self._traced.to(torch.get_default_dtype())
        function, args = self._whole
        return function(*[one._large() if type(one) is HostFuture else float(one) for one in args])

    def in_graph(self) -> torch.Tensor | None:
        """The value as a traced tensor to compute with, of a comparison its assumed outcome; None where the host alone has it."""
        if self._compared:
            return torch.full((), bool(self))
        if self._whole is not None:
            return self.fraction()
        if self._traced is not None or self._later is None:
            return self._traced
        made = self._later()
        return made if isinstance(made, torch.Tensor) else None

    def read_of(self) -> torch.Tensor | None:
        """The tensor of the graph whose numbers these are (``lengths.tolist()``, an entry of it), if they are those of one."""
        if self._compared:
            return self.in_graph()
        if self._traced is not None:
            return None if self._whole is not None else self._traced
        call = self._calls.calls[self._slot.index]
        if call.text not in ("tolist", "numpy") or (self._is_taken() if self._known is None else self._known.changed):
            return None
        tensor: torch.Tensor = call.args[0]
        for kind, key in self._slot.path:
            if kind != "item" or type(key) is not int or tensor.ndim == 0:
                return None
            tensor = tensor[key]
        self._calls.read.add(self._slot.index)
        return tensor

    def _is_taken(self) -> bool:
        """Whether a call has got it, which may have changed it."""
        later = self._calls.calls[self._slot.index + 1 :]
        taken = (one for call in later for one in pytree.tree_leaves((call.args, call.kwargs)) if type(one) is HostFuture)
        return any(one._slot.index == self._slot.index for one in taken)

    def assumed(self, tensor: torch.Tensor) -> int | None:
        """The outcome that the running step is assumed to compute as ``tensor``, a whole number that is mostly 0; None where
        nothing can be."""
        try:
            return None if self._calls.asked is None else int(self._calls.asked.outcome(tensor, likely=0))
        except UnknownValueError:
            return None

    def example(self) -> Any:
        """A value of the same type and shape, or None."""
        return self._like

    def looked_at(self, function: Callable[[Any], Any]) -> HostFuture:
        """``function`` of it, a look at whether it is finite."""
        return self._apply(function, self, traced=True)

    @property
    def as_offset(self) -> Offset | None:
        """The number as another and what is added to that, where it is a whole number that is known before the step."""
        known = self._known
        if known is None or known.changed or self._traced is None or type(self._like) is not int:
            return None
        return known.offset or (known.text, 0)

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

    def drop_unused(self) -> None:
        """Nobody wants it, unless somebody uses it later."""
        self._calls.pure.add(self._slot.index)

    def is_of_state(self) -> bool:
        """Whether it is a real number that buffers or parameters tell before the step."""
        known, kind = self._known, type(self._like)
        return known is not None and known.of_state and not known.changed and self._traced is not None and kind in (int, float)

    def drawn(self) -> HostScalar | None:
        """The expression of a number that torch draws before the step; None of any other value."""
        known, asked = self._known, self._calls.asked
        if known is None or not known.drawn or known.changed or asked is None or type(self._like) not in (int, float):
            return None
        return asked.number(known.of, known.text)

    def known_before(self) -> tuple[Expression, str] | None:
        """An expression that gives it before the step, and its text, where the batch tells it."""
        known = self._known
        return None if known is None or known.of_state or known.changed else (known.of, known.text)

    def may_move(self) -> bool:
        """Whether programs may take it as an input; if not, it is a constant of each."""
        return self._calls.asked is not None and self._calls.asked.offsets.meet()

    def is_of_host(self) -> bool:
        """Whether the host alone computes it, after the step."""
        return self._known is None and self._made is None and self._computes is None

    def stays_a_number(self) -> bool:
        """Whether it is a real number of the graph that only the running step knows."""
        return self._known is None and self._traced is not None and isinstance(self._like, int | float)

    def _is_small(self) -> bool:
        """Whether the graph has bits enough for the whole number: a guard where it is known before the step, else assumed."""
        known, asked = self._known, self._calls.asked
        if self._top <= NARROW:
            return True
        if asked is None or (known is not None and known.changed):
            return False
        try:
            if known is not None:
                return asked.assume(lambda host_values: abs(known.of(host_values)) < SAFE, f"whether {known.text} is small")
            return not asked.outcome(self._large().detach().abs() >= SAFE)
        except UnknownValueError:
            return False

    def as_float(self) -> HostFuture:
        """The number as ``float()`` gives it."""
        if type(self._like) is float:
            return self
        made = self._apply(float, self, traced=True)
        made._like = 0.0
        return made

    # -- derived values --------------------------------------------------------------------------------------------

    def _apply(self, function: Callable[..., Any], *args: Any, traced: bool = False, **kwargs: Any) -> Any:
        """``function`` on the host; with ``traced`` in the graph as well, where all arguments are there."""
        known = None if kwargs else known_result(function, args, _known_operand)
        if known is None and self._known is not None and (kwargs or function is _call):
            self._known.changed.append(getattr(function, "__name__", "a call"))
        slot = self._record(function, args, kwargs, pure=known is not None)
        both: Any = None
        deferred = [a for a in args if type(a) is HostFuture]
        likes = [a._like if type(a) is HostFuture else a for a in args]
        if function in _JUMPS and any(isinstance(like, float) for like in likes):
            traced = False
        bound = _bound_of_result(function, args, likes)
        if bound is None and function in whole_numbers.OF_RIGHT_ONES and all(one._is_small() for one in deferred):
            bound = NARROW  # a place in a queue: (start + 16) % 64
        if bound is None:
            traced = False
        if traced and all((one._computes is not None or one._made is not None) and not one._compared for one in deferred):
            both = functools.partial(_computed, function, args)
            of_others = any(type(a) in (float, HostScalar) for a in args) or any(one._computes for one in deferred)
            if function not in _ARITHMETIC or not of_others:
                both = both()
        numbers = not kwargs and all(isinstance(like, int | float) for like in likes)
        like = _number_like(function, likes) if numbers else None
        compared = None if both is None or known is not None else _compared(function, args, slot)
        later = _later_of(function, args, kwargs) if both is None and known is None else None
        if both is None and numbers and known is not None and known.drawn and self._calls.asked is not None:
            return self._calls.asked.number(known.of, known.text)
        made = HostFuture(self._calls, slot, both, like, known, compared, later)
        if both is not None and bound is not None:
            made._top = bound
            made._whole = (function, args) if bound > NARROW else None
        return made.as_count() if any(type(a) is HostFuture and a._counts for a in args) else made

    def _record(self, function: Callable[..., Any], args: Any, kwargs: Any, *, pure: bool = False) -> ValueSlot:
        if self._calls.closed:
            raise RuntimeError(
                "a value of a step that was being captured was kept in an object that compiled steps do not follow; keep it in "
                "an attribute, list or dict of the module or of a callback"
            )
        return self._calls.record(function, args, kwargs, text=getattr(function, "__name__", repr(function)), pure=pure)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str | int):
            return self._apply(operator.getitem, self, key)
        like: Any = self._like
        part = like[key] if hasattr(like, "__getitem__") else None  # a KeyError or IndexError is the right answer
        known = self._known and self._known.then(operator.itemgetter(key), f"entry {key!r}")
        whole = self._later
        later = None if whole is None else lambda: None if (made := whole()) is None else made[key]
        return HostFuture(self._calls, self._slot.part("item", key), like=part, known=known, later=later)

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
        if self._known is not None and name not in _PURE:
            self._known.changed.append(name)
        return HostFuture(self._calls, self._slot.part("attr", name), known=known)

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
        return self._apply(_call, self, *args, **kwargs)

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
            args, kwargs = multiplied(func, *pytree.tree_unflatten([_graph_value(leaf, like) for leaf in leaves], spec))
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
        if method == "__call__" and not kwargs and ufunc in _IN_GRAPH:
            return self.looked_at(ufunc)
        return self._apply(getattr(ufunc, method), *args, **kwargs)

    # -- what needs the value --------------------------------------------------------------------------------------

    def refusal(self, reason: str, *, at_origin: bool = False) -> Exception:
        """The error for a use that needs the value during the step, here or, with ``at_origin``, where the value comes from."""
        return self._calls.refuse(reason, _FIX, self._calls.calls[self._slot.index].where if at_origin else None)

    def _refuse_as(self, use: str) -> NoReturn:
        raise self.refusal(_needed_by(use))

    def _exact(self, use: str, read: Callable[[Any], Any] | None = None) -> Any:
        """The value, or what ``read`` gives of it, for a use that needs it: what is known before the step is a guard."""
        known, asked = self._known, self._calls.asked
        if known is None and self._traced is not None and read is not None:
            return self._outcome(use, read)
        if known is None or asked is None or known.changed:
            self._refuse_as(use)
        if read is not None:
            known = known.then(read, read.__name__)
        try:
            return asked.assume(known.of, known.text, drawn=known.drawn)
        except UnknownValueError:
            if known.drawn:
                raise self.refusal(
                    f"{use} needs a fraction that torch draws at random: every step would be another program"
                ) from None
            self._refuse_as(use)

    def _outcome(self, use: str, read: Callable[[Any], Any]) -> Any:
        """``read`` of the value where only the running step knows it: one is assumed."""
        traced, asked, compared = self._traced, self._calls.asked, self._compared
        assert traced is not None
        if asked is None:
            self._refuse_as(use)
        if self._whole is not None:
            large = self._large().detach()
            traced = self.fraction().detach() != 0 if read is bool else torch.where(large.abs() < SAFE, traced, _NOT_WHOLE)
        whole = read is int and traced.is_floating_point()
        slot = self._slot
        if whole:  # such as the place that was drawn: int(torch.rand(1).item() * 4); near to the next one the host tells
            slot = self._record(int, (self,), {})
            compared = Compared(traced.detach(), traced.detach().round(), slot)
            traced = torch.where(traced.abs() < _WHOLE, traced.detach(), _NOT_WHOLE).to(torch.int32)
        if compared is None:
            self._calls.pure.add(slot.index)  # made for this answer
        else:
            self._calls.used.add(slot.index)
        if read is bool and traced.dtype != torch.bool:
            traced = traced != 0
        try:
            found = asked.outcome(traced, compared=compared, likely=0 if whole else None)
            if (whole or self._whole is not None) and found == _NOT_WHOLE:
                self._refuse_as(use)
            return read(found)
        except UnknownValueError:
            self._refuse_as(use)

    def __bool__(self) -> bool:
        return self._exact("a Python branch (if, and, or, max, in …)", bool)

    def __index__(self) -> int:
        return self._exact("an index or range()", operator.index)

    def __int__(self) -> int:
        return self._exact("int()", int)

    def __float__(self) -> float:
        return self._exact("float()", float)

    def __complex__(self) -> complex:
        return self._exact("complex()", complex)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._exact("a conversion to numpy"), dtype)

    def __hash__(self) -> int:
        use = "a key of a dict or set"
        if not self.stays_a_number() or is_user_file(sys._getframe(1).f_code.co_filename):
            return hash(self._exact(use))
        raise self._calls.unhashable(_needed_by(use), _FIX)  # a library that keeps results by sizes goes on without

    def __len__(self) -> int:
        return len(self._like) if self._like is not None else self._exact("len()", len)

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

    def __enter__(self) -> Any:
        self._refuse_as("a with block")

    def __exit__(self, *_: Any) -> None:
        """Never reached."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_as("a copy or pickle")

    def __deepcopy__(self, memo: Any) -> HostFuture:
        return self


def _needed_by(use: str) -> str:
    return (
        f"{use} needs the value of a tensor or of a host call (.item(), .numpy(), a torchmetrics result), which exists only "
        "after the step has run"
    )


def _computed(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``function`` in the graph; None where that gives no tensor."""
    take = _number_of if function not in whole_numbers.FUNCTIONS or any(map(_is_fraction, args)) else _as_it_is
    found = _IN_GRAPH.get(function, function)(*(take(a) if type(a) in (HostFuture, int) else a for a in args))
    return found if isinstance(found, torch.Tensor) else None


def _known_operand(arg: Any) -> Known | None:
    if type(arg) is HostScalar:
        return Known(*arg.deferred())
    return arg._known if type(arg) is HostFuture else None


_IN_GRAPH: dict[Any, Callable[..., Any]] = {
    **{getattr(owner, name): getattr(torch, name) for owner in (math, np) for name in ("isnan", "isinf", "isfinite")},
    float: lambda tensor: tensor.detach().to(torch.get_default_dtype()),
}
"""Functions of Python numbers, and what they are on tensors."""


def _compared(function: Callable[..., Any], args: tuple[Any, ...], slot: ValueSlot) -> Compared | None:
    """The numbers that ``function`` compares, where the graph has them in less precision than Python."""
    if function not in _COMPARISONS:
        return None
    left, right = (_number_of(arg) for arg in args)
    if not any(one.is_floating_point() if isinstance(one, torch.Tensor) else isinstance(one, float) for one in (left, right)):
        return None
    return Compared(left, right, slot)


_JUMPS = (operator.floordiv, operator.mod)
"""Of fractions they jump where these round: in the precision of Python elsewhere than in a graph's."""
_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


def _number_of(arg: Any) -> torch.Tensor | float:
    """An operand as a 0-d tensor of the graph, or the number that it is."""
    if type(arg) is HostFuture:
        return arg.fraction()
    if type(arg) is int and abs(arg) > _WHOLE:
        return float(arg)
    return arg.tensor() if type(arg) is HostScalar else arg


def _as_it_is(arg: Any) -> Any:
    return arg._traced if type(arg) is HostFuture else arg


def _bound_of_result(function: Callable[..., Any], args: tuple[Any, ...], likes: Sequence[Any]) -> float | None:
    """See :func:`~torch_compat.step.host.whole_numbers.bound_of`; that of a tensor where this is no function of whole numbers."""
    if function not in whole_numbers.FUNCTIONS or not all(type(like) is int for like in likes):
        return NARROW
    if function is operator.pow and type(args[1]) is not int:
        return None
    return bound_of(function, [float(abs(a)) if type(a) is int else a._top if type(a) is HostFuture else NARROW for a in args])


def _is_fraction(arg: Any) -> bool:
    return isinstance(arg._like if type(arg) is HostFuture else arg, float)


def _later_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Computes a function of deferred values in the graph; None where the host alone has one of them."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    deferred = [leaf for leaf in leaves if type(leaf) is HostFuture]
    if (
        function is _call
        or not any(one._later or one._compared for one in deferred)
        or any(type(leaf) is HostScalar for leaf in leaves)
    ):
        return None

    @functools.cache
    def later() -> Any:
        values = [leaf.in_graph() if type(leaf) is HostFuture else leaf for leaf in leaves]
        if any(value is None and type(leaf) is HostFuture for value, leaf in zip(values, leaves, strict=True)):
            return None
        args, kwargs = pytree.tree_unflatten(values, spec)
        return _IN_GRAPH.get(function, function)(*args, **kwargs)

    return later


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


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
        if not isinstance(self._like, np.ndarray | list):
            return NotImplemented
        if self._slot.index in self._calls.read:
            raise self.refusal("an array whose memory a tensor may have is changed in place")
        made = self._apply(function, self, other)
        made.slot()  # others may have the array
        return made

    return method


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


def _graph_value(leaf: Any, like: torch.Tensor | None) -> Any:
    """A deferred number as a traced scalar, with the dtype that a Python number would take beside ``like``."""
    if type(leaf) is not HostFuture:
        return leaf
    traced = leaf._traced
    assert traced is not None
    if like is not None and (like.is_floating_point() or like.is_complex()):
        return leaf.fraction().to(like.dtype)
    if not leaf._is_small():
        leaf._refuse_as("a whole number that may have more than 32 bits")
    return traced


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether a torch function changes one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))
    return in_place or name in ("__setitem__", "copy_", "__set__") or bool(kwargs and kwargs.get("out") is not None)


def _number_like(function: Callable[..., Any], likes: list[Any]) -> Any:
    """An example number of the type that ``function`` returns; None if it cannot be told."""
    ones = [like.__class__(1) for like in likes]  # a counter passes for a number
    try:
        return function(*ones)
    except (TypeError, ValueError, ArithmeticError):
        return None
