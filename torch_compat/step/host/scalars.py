"""Counters of the loop (``batch_idx``, ``current_epoch``, ``global_step``) inside a captured step.

A captured step's Python runs once, but its counters go on. While a step is captured they are :class:`HostScalar` objects, which
look like an ``int`` to user code:

- arithmetic with Python numbers gives another host scalar, an expression over the counters;
- in tensor arithmetic the expression becomes an input of the program, evaluated on the host before every step;
- a comparison, or any other use that needs the value, becomes a guard: a later step for which it comes out otherwise uses, or
  captures, another variant.
"""

from __future__ import annotations

import contextlib
import math
import operator
import traceback
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.factors import for_each, is_of_lists, multiplied
from torch_compat.step.host.holders import HASHED_BY_VALUE, HOLDERS, numbers_in, text_of
from torch_compat.step.host.host_values import Expression, HostValues
from torch_compat.step.host.offsets import Offset, moved
from torch_compat.step.host.said import Said
from torch_compat.step.host.scalar_plan import SLOTS, ArrayForm, ArraysWantedError, Guard, ScalarPlan
from xlatrain.bridge.capture.recorded.tape import is_written
from xlatrain.bridge.errors import CaptureError, user_line

if TYPE_CHECKING:
    from torch_compat.plugins.loss_scaling import LossScaling
    from torch_compat.step.host.calls import HostCalls
    from torch_compat.step.host.draws import DrawRecorder


class ScalarTracer:
    """Follows the use of counters while a step is captured.

    Args:
        host_values: the counters' values now.
        wholes, fractions: the traced inputs, int64[SLOTS] and float32[SLOTS] (float64 with x64).
        arrays: the traced inputs that are arrays, with the dtype that each has for torch.
        loss_scale: loss scaling on traced tensors; None without.

    Attributes:
        recorder: notes what is drawn; None before and after the user's Python.
        watches_draws: whether draws by functions that somebody imported by name are looked for.
        calls: what the step does on the host; None where nothing is noted.
    """

    def __init__(
        self,
        host_values: HostValues,
        wholes: torch.Tensor,
        fractions: torch.Tensor,
        loss_scale: LossScaling | None = None,
        arrays: Sequence[torch.Tensor] = (),
    ) -> None:
        self.loss_scale = loss_scale
        self.plan = ScalarPlan()
        self.recorder: DrawRecorder | None = None
        self.watches_draws = False
        self.calls: HostCalls | None = None
        self._env = host_values
        self._late: dict[str, int | float] = {}
        self._inputs = {"wholes": wholes, "fractions": fractions}
        self._slots: dict[str, torch.Tensor] = {}
        self._drawn: set[str] = set()
        self._arrays = arrays
        self._shared: list[list[torch.Tensor]] = []

    def new_shared(self) -> list[torch.Tensor]:
        """A list for the tensors that share the memory of an array."""
        self._shared.append([])
        return self._shared[-1]

    def drawn(self, name: str) -> HostScalar:
        """A number drawn at random for each step; it may be computed and compared with."""
        self.note_drawn(name)
        return self.counter(name)

    def note_drawn(self, name: str) -> None:
        """Note that ``name`` is another number, or are other numbers, for each step."""
        self._drawn.add(name)

    def is_drawn(self, text: str) -> bool:
        """Whether an expression has a number in it that is drawn."""
        return any(name in text for name in self._drawn)

    def exact(self, expression: Expression, text: str) -> Any:
        """The value of an expression now, for a use that needs it as it is.

        Raises:
            CaptureError: it is a random number, which never comes again.
        """
        if self.is_drawn(text):
            where = user_line(traceback.extract_stack()) or "the step"
            of_a_clock = any(name in text for name in self._drawn if name.startswith("time."))
            source, instead = "drawn at random", "draw with torch (torch.rand, …)"
            if any(name in text for name in self._drawn if name.startswith("torch's ")):
                instead = "compute with tensors of one size"
            if of_a_clock:
                source, instead = "read from a clock", "read it in a hook"
            raise CaptureError(
                f"{where}\n  cannot be captured: the number {text}, {source}, is used as an index, a size, a key or in a text, "
                f"so that every step would be another program.\n  Fix: use it in arithmetic or comparisons, or {instead}."
            )
        return self.guard(expression, f"{text} ==")

    def counter(self, name: str) -> HostScalar:
        """The counter ``name`` as user code sees it."""
        found = HostScalar(self, lambda host_values: host_values.numbers[name], name, self._env.numbers[name])
        return found + self.plan.moved[name] if name in self.plan.moved else found

    def advance(self, name: str) -> None:
        """The step moves the counter ``name`` on by one."""
        self.plan.moved[name] = self.plan.moved.get(name, 0) + 1

    def late(self, name: str, like: int | float) -> HostScalar:
        """A number that the host knows only after this step's Python has changed it; ``like`` it in type.

        Arithmetic with it is an input of the program; a use that needs the value itself is a :class:`CaptureError`, since what
        selects a variant must be known before.
        """
        self._late[name] = like
        return HostScalar(self, lambda host_values: host_values.numbers[name], name, like)

    def guard(self, expression: Expression, text: str) -> Any:
        """The value of an expression now; assumed from now on."""
        outcome = expression(self._env)
        if not any(guard.text == text for guard in self.plan.guards):
            self.plan.guards.append(Guard(expression, outcome, text))
        return outcome

    def traced(self, expression: Expression, text: str) -> torch.Tensor:
        """The expression as a traced 0-d tensor: int64 or float32 (float64 with x64).

        Raises:
            CaptureError: more expressions than there are slots.
        """
        if text not in self._slots:
            now: Any = ChainMap(self._late, self._env.numbers)
            whole = isinstance(expression(replace(self._env, numbers=now)), int)
            name = "wholes" if whole else "fractions"
            expressions: list[Expression] = getattr(self.plan, name)
            if len(expressions) == SLOTS:
                raise CaptureError(
                    f"the step computes with more than {SLOTS} expressions of batch_idx, current_epoch and global_step; "
                    "the last one is "
                    f"{text}. Compute such values in a hook and keep them in a buffer."
                )
            self._slots[text] = self._inputs[name][len(expressions)]
            expressions.append(expression)
            self.plan.texts.append(text)
        return self._slots[text]

    def array(self, expression: Expression, text: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An array that an expression gives as a traced tensor.

        Raises:
            ArraysWantedError: it is no input of this run.
        """
        if text not in self._slots:
            form, used = ArrayForm(shape, dtype), self.plan.array_forms
            given = self._arrays[len(used)] if len(used) < len(self._arrays) else None
            if given is None or ArrayForm(tuple(given.shape), given.dtype) != form:
                raise ArraysWantedError((*used, form))
            self._slots[text] = given
            self.plan.arrays.append((expression, form))
            self.plan.texts.append(text)
        return self._slots[text]

    def check_arrays(self) -> None:
        """Look whether all arrays of the run are used, at its end, and none that several tensors share is changed.

        Raises:
            ArraysWantedError: some are not used.
            CaptureError: one is changed.
        """
        if any(len(tensors) > 1 and any(map(was_written, tensors)) for tensors in self._shared):
            raise CaptureError(
                "the step makes several tensors of one array, drawn at random, and changes one of them in place: outside "
                "of a compiled step they may share memory. Make one tensor of it, or take torch.tensor(array) of a copy"
            )
        if len(self.plan.arrays) != len(self._arrays):
            raise ArraysWantedError(self.plan.array_forms)

    def computed(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A function of numpy's of counters and numbers, as an expression; a guard where it gives no number."""
        leaves, spec = pytree.tree_flatten(args)
        parts = [_operand(leaf) for leaf in leaves]

        def value(of: Callable[[_Operand], Any]) -> Any:
            return _as_one(function(*pytree.tree_unflatten(map(of, parts), spec)))

        def expression(host_values: HostValues) -> Any:
            return value(lambda part: part.expression(host_values))

        given = str(pytree.tree_unflatten([part.text for part in parts], spec)).replace("'", "")
        now, text = value(lambda part: part.value), f"{function.__name__}{given}"
        if type(_as_number(now)) in (int, float):
            return HostScalar(self, expression, text, now)
        if type(_as_number(now)) is bool:
            return type(now)(self.guard(lambda host_values: bool(expression(host_values)), text))
        return function(*pytree.tree_unflatten([one._exact() if type(one) is HostScalar else one for one in leaves], spec))


def _binary(symbol: str, function: Callable[[Any, Any], Any], *, swap: bool = False) -> Any:
    def method(self: HostScalar, other: Any, *modulus: int) -> Any:
        if type(other) is not HostScalar and not issubclass(type(other), int | float):  # a deferred value passes for a number
            return NotImplemented
        if modulus:  # pow(batch_idx, 2, 5)
            return function(self._exact(), other, *modulus)
        left, right = (_operand(other), _operand(self)) if swap else (_operand(self), _operand(other))
        text = f"({left.text} {symbol} {right.text})"
        value = function(left.value, right.value)
        return HostScalar(
            self._tracer,
            lambda host_values: function(left.expression(host_values), right.expression(host_values)),
            text,
            value,
            None if isinstance(value, np.generic) else moved(function, self._offset, other, swap=swap),
        )

    return method


@dataclass(frozen=True)
class _Operand:
    expression: Expression
    text: str
    value: Any


def _operand(number: Any) -> _Operand:
    """A host scalar, or a Python number, as part of an expression."""
    if type(number) is HostScalar:
        return _Operand(*number.deferred(), number.shown())
    return _Operand(lambda host_values: number, repr(number), number)


def _comparison(symbol: str, function: Callable[[Any, Any], bool]) -> Any:
    def method(self: HostScalar, other: Any) -> Any:
        if type(other) is not HostScalar and not issubclass(type(other), int | float):
            return NotImplemented
        mine, theirs = _operand(self), _operand(other)
        guard = f"{self._text} {symbol} {theirs.text}"
        kind: Any = type(function(mine.value, theirs.value))  # or numpy's
        return kind(
            self._tracer.guard(
                lambda host_values: bool(function(mine.expression(host_values), theirs.expression(host_values))), guard
            )
        )

    return method


def _pair(first: Callable[[Any, Any], Any], second: Callable[[Any, Any], Any], *, swap: bool = False) -> Any:
    """A method with both results of ``divmod``."""

    def method(self: HostScalar, other: Any) -> Any:
        left, right = (other, self) if swap else (self, other)
        return first(left, right), second(left, right)

    return method


def _unary(name: str, function: Callable[[Any], Any]) -> Any:
    def method(self: HostScalar, *args: Any) -> Any:
        mine, _ = self.deferred()
        value = function(self.shown(), *args)
        return HostScalar(self._tracer, lambda host_values: function(mine(host_values), *args), f"{name}({self._text})", value)

    return method


class HostScalar:
    """A counter of the loop, or an expression over counters, while a step is captured. It passes for an ``int`` or ``float``.

    Or for a number of numpy's, where one of its functions has computed it. It is computed with as Python's all the same.
    """

    def __init__(self, tracer: ScalarTracer, expression: Expression, text: str, value: Any, offset: Offset | None = None) -> None:
        self._tracer = tracer
        self._kind: Any = type(value) if isinstance(value, np.generic) else None
        self._expression = expression if self._kind is None else lambda host_values: _as_number(expression(host_values))
        self._text = text
        self._value = _as_number(value)
        self._offset = offset or (text, 0)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._kind or type(self._value)

    def shown(self) -> Any:
        """The value as user code would have it now."""
        return self._value if self._kind is None else self._kind(self._value)

    def _exact(self) -> Any:
        """The value, for uses that need it as it is; a guard on exactly this value."""
        value = self._tracer.exact(self._expression, self._text)
        return value if self._kind is None else self._kind(value)

    def tensor(self) -> torch.Tensor:
        """The value as a traced 0-d tensor."""
        return self._tracer.traced(self._expression, self._text)

    def mapped(self, function: Callable[[Any], Any]) -> HostScalar:
        """The expression ``function(self)``."""
        return _unary(function.__name__, function)(self)

    def of_several(self, function: Callable[..., Any], numbers: tuple[Any, ...]) -> Any:
        """``function`` of several numbers, this among them."""
        return self._tracer.computed(function, numbers)

    @property
    def text(self) -> str:
        """The expression in words: the same words, the same number in every step."""
        return self._text

    @property
    def as_offset(self) -> Offset | None:
        """The number as another and what is added to that, where it is a whole number."""
        return self._offset if self._is_index() else None

    @property
    def is_drawn(self) -> bool:
        """Whether it depends on a number that is drawn for each step."""
        return self._tracer.is_drawn(self._text)

    def as_int(self) -> HostScalar:
        """The number as ``int()`` gives it."""
        return self if self._is_index() else self.mapped(int)

    def _is_index(self) -> bool:
        return self._kind is None and type(self._value) is int

    def deferred(self) -> tuple[Expression, str]:
        """The expression and its text, to be evaluated with the counters of a later step."""
        mine, kind = self._expression, self._kind
        return mine if kind is None else lambda host_values: kind(mine(host_values)), self._text

    def entry_of(self, holder: Any) -> Any:
        """``holder[self]``: of a list, tuple, dict or array of numbers of one type an expression for later steps too.

        As of the other questions about a holder, whoever asks has a guard on what is in it.
        """
        numbers = numbers_in(holder) if type(self._value) is int else None
        if numbers is None or not (self.is_in(holder) if type(numbers) is dict else self._counts_into(numbers)):
            return holder[self]  # which raises what Python raises
        return self._looked_up(numbers, numbers.__getitem__)

    def get_of(self, holder: dict[Any, Any], default: Any = None) -> Any:
        """``holder.get(self, default)``."""
        numbers = numbers_in({**holder, None: default}) if type(self._value) is int else None
        if numbers is None or None in holder:
            return holder[self] if self.is_in(holder) else default
        return self._looked_up(numbers, lambda number: numbers[number if number in numbers else None])

    def is_in(self, holder: Any) -> Any:
        """``self in holder``: a guard on the answer, not on the number."""
        kind = type(holder)
        if kind is not range and not (kind in HOLDERS and {type(one) for one in holder} <= HASHED_BY_VALUE):
            return self in holder
        known, mine = holder if kind is range else frozenset(holder), self._expression
        return self._tracer.guard(lambda host_values: mine(host_values) in known, f"{self._text} in {text_of(known)}")

    def _counts_into(self, numbers: tuple[Any, ...]) -> Any:
        count, mine = len(numbers), self._expression
        return self._tracer.guard(lambda host_values: -count <= mine(host_values) < count, f"{self._text} among {count} entries")

    def _looked_up(self, numbers: Any, function: Callable[[Any], Any]) -> HostScalar:
        mine, text = self._expression, f"{text_of(numbers)}[{self._text}]"
        return HostScalar(self._tracer, lambda host_values: function(mine(host_values)), text, function(self._value))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_of_lists(func):
            with contextlib.suppress(TypeError):  # an argument that the function of one tensor has not
                return for_each(func, args, kwargs)
        leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
        like = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        if like is not None and func not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):  # patched ones while capturing
            traced = [_as_like(leaf.tensor(), like) if type(leaf) is HostScalar else leaf for leaf in leaves]
            args, kwargs = multiplied(func, *pytree.tree_unflatten(traced, spec))
            with contextlib.suppress(TypeError, RuntimeError):  # a size, a dim, a rate: torch wants a number there
                return func(*args, **kwargs)
        # a factory (torch.full(size, i), torch.arange(i)), x[:, i], x.roll(i)
        exact = [leaf._exact() if type(leaf) is HostScalar else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(exact, spec)
        return func(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._exact(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        inputs = tuple(map(_as_one, inputs))
        if method == "__call__" and not kwargs and all(map(_is_number, inputs)) and ufunc.nout == 1:
            return self._tracer.computed(ufunc, inputs)
        return getattr(ufunc, method)(*(one._exact() if type(one) is HostScalar else one for one in inputs), **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not kwargs and all(map(_is_number, leaves)):  # np.clip(n, 0, 1), np.interp(n, [0, 10], [0.0, 1.0])
            return self._tracer.computed(func, args)
        args, kwargs = pytree.tree_unflatten([one._exact() if type(one) is HostScalar else one for one in leaves], spec)
        return func(*args, **kwargs)

    def __copy__(self) -> HostScalar:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> HostScalar:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__class__, (self._exact(),)

    def __bool__(self) -> bool:
        return self._tracer.guard(lambda host_values: bool(self._expression(host_values)), f"bool({self._text})")

    def __index__(self) -> int:
        return operator.index(self._exact())

    def __int__(self) -> int:
        return int(self._exact())

    def __float__(self) -> float:
        return float(self._exact())

    def __hash__(self) -> int:
        return hash(self._exact())

    def __str__(self) -> str:
        return str(self._exact())

    def __repr__(self) -> str:
        return repr(self._exact())

    def __format__(self, spec: str) -> str:
        return format(self._exact(), spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exact(), name)

    def to_say(self) -> Any:
        """The number as it is formatted in a text that is said after each step."""
        calls = self._tracer.calls
        return self if calls is None else Said(self, calls)

    def item(self) -> Any:
        """The number itself (numpy's and torch's way to ask for it); of a number of numpy's Python's."""
        return self._exact() if self._kind is None else self.mapped(_as_number)

    __add__, __radd__ = _binary("+", operator.add), _binary("+", operator.add, swap=True)
    __sub__, __rsub__ = _binary("-", operator.sub), _binary("-", operator.sub, swap=True)
    __mul__, __rmul__ = _binary("*", operator.mul), _binary("*", operator.mul, swap=True)
    __truediv__, __rtruediv__ = _binary("/", operator.truediv), _binary("/", operator.truediv, swap=True)
    __floordiv__, __rfloordiv__ = _binary("//", operator.floordiv), _binary("//", operator.floordiv, swap=True)
    __mod__, __rmod__ = _binary("%", operator.mod), _binary("%", operator.mod, swap=True)
    __pow__, __rpow__ = _binary("**", pow), _binary("**", pow, swap=True)
    __divmod__, __rdivmod__ = _pair(operator.floordiv, operator.mod), _pair(operator.floordiv, operator.mod, swap=True)
    __and__, __rand__ = _binary("&", operator.and_), _binary("&", operator.and_, swap=True)
    __or__, __ror__ = _binary("|", operator.or_), _binary("|", operator.or_, swap=True)
    __xor__, __rxor__ = _binary("^", operator.xor), _binary("^", operator.xor, swap=True)
    __lshift__, __rlshift__ = _binary("<<", operator.lshift), _binary("<<", operator.lshift, swap=True)
    __rshift__, __rrshift__ = _binary(">>", operator.rshift), _binary(">>", operator.rshift, swap=True)
    __invert__ = _unary("~", operator.invert)
    __neg__, __pos__, __abs__ = _unary("-", operator.neg), _unary("+", operator.pos), _unary("abs", operator.abs)
    __round__, __trunc__ = _unary("round", round), _unary("trunc", math.trunc)
    __floor__, __ceil__ = _unary("floor", math.floor), _unary("ceil", math.ceil)
    __lt__, __le__ = _comparison("<", operator.lt), _comparison("<=", operator.le)
    __gt__, __ge__ = _comparison(">", operator.gt), _comparison(">=", operator.ge)
    __eq__, __ne__ = _comparison("==", operator.eq), _comparison("!=", operator.ne)


def _as_one(value: Any) -> Any:
    """An array that is a number (``np.float64(1) < n`` makes some) as the number."""
    return value[()] if type(value) is np.ndarray and value.ndim == 0 else value


def _as_number(value: Any) -> Any:
    """A number of numpy's as Python's."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in "biuf" else value


def _is_number(value: Any) -> bool:
    """Whether it is a counter, a number, or an argument of numpy's that is left out."""
    return type(value) is HostScalar or value is None or isinstance(value, int | float | np.number | np.bool_)


def was_written(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor was changed in place since the capture began."""
    elem: Any = getattr(tensor, "elem", None)
    if elem is None:
        return is_written(tensor)
    functionalize: Any = torch
    return functionalize._functionalize_has_data_mutation(elem) or functionalize._functionalize_was_storage_changed(elem)


def _as_like(scalar: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A traced scalar with the dtype that a Python number would take beside ``like``."""
    if like.is_floating_point() or like.is_complex():
        return scalar.to(like.dtype)
    if not scalar.is_floating_point() and like.dtype != torch.bool:
        return scalar.to(like.dtype)
    return scalar.to(torch.get_default_dtype()) if scalar.dtype == torch.float64 else scalar
