"""Arrays that a step draws from numpy's random generators, while the step is captured.

They are computed on the host before each step, as counters are (:mod:`torch_compat.step.host.scalars`), and where they become
tensors they are inputs of the program. Their shapes are those of the capture.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from torch_compat.step.host.host_values import Expression, HostValues
from torch_compat.step.host.scalars import HostScalar, was_written
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.tensors.dtypes import torch_dtype

if TYPE_CHECKING:
    from torch_compat.step.host.scalars import ScalarTracer

_KINDS = "biuf"
_PLAIN = (bool, int, float, str, type(None), np.dtype, type)
_FIX = "compute with it, ask for one of its numbers, make it a tensor (torch.as_tensor, torch.from_numpy), or draw with torch"


def is_array(value: Any) -> bool:
    """Whether what was drawn is an array of numbers, which can be an input of a program."""
    return type(value) is np.ndarray and value.dtype.kind in _KINDS and value.ndim > 0


class HostArray:
    """An array that is another one for each step, of the same shape. It passes for an ``np.ndarray``.

    Args:
        tracer: the capture's.
        expression: gives the array of a step; nobody changes what it gives.
        text: what tells it from others.
        value: the array now.
        shared: lists of the tensors that have their values from it, or from an array with whose memory it may have to do.
    """

    def __init__(
        self,
        tracer: ScalarTracer,
        expression: Expression,
        text: str,
        value: np.ndarray,
        shared: Sequence[list[torch.Tensor]] = (),
    ) -> None:
        self._tracer = tracer
        self._expression = expression
        self._text = text
        self._value = value
        self._shared = shared or [tracer.new_shared()]

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return np.ndarray

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._value.shape

    @property
    def ndim(self) -> int:
        return self._value.ndim

    @property
    def size(self) -> int:
        return self._value.size

    @property
    def dtype(self) -> np.dtype:
        return self._value.dtype

    @property
    def T(self) -> HostArray:
        return self._then(np.transpose, "transpose")

    def tensor(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The array as a traced tensor of ``dtype``, of its own without; a copy, whose writes :meth:`_check` looks for."""
        self._check()
        own, mine = torch_dtype(self.dtype), self._expression
        as_dtype = dtype or own

        def expression(host_values: HostValues) -> np.ndarray:
            value = mine(host_values)
            return value if dtype in (None, own) else torch.tensor(value).to(as_dtype).numpy()

        if as_dtype == torch.bfloat16 or as_dtype.is_complex:  # of which numpy knows nothing, or which the host need not make
            return self.tensor().to(as_dtype)
        made = self._tracer.array(expression, f"{self._text} as {as_dtype}", self.shape, as_dtype).clone()
        for tensors in self._shared:
            tensors.append(made)
        return made

    def deferred(self) -> tuple[Expression, str]:
        """An expression that gives a copy of it for a later step, and its text."""
        self._check()
        mine = self._expression
        return lambda host_values: np.array(mine(host_values)), self._text

    def _check(self) -> None:
        if any(was_written(tensor) for tensors in self._shared for tensor in tensors):
            self._refuse("it has changed in place as a tensor, which shares its memory, and is used again")

    def _refuse(self, why: str) -> NoReturn:
        raise CaptureError(
            f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: of the array {self._text}, drawn at "
            f"random, {why}: a compiled step gets another array each time.\n  Fix: {_FIX}."
        )

    def _then(self, function: Callable[..., Any], text: str, *others: Any, **kwargs: Any) -> Any:
        """``function`` of it and of ``others``: an array, a number, or where that is a bool, a guard."""
        return computed(self._tracer, function, (self, *others), kwargs, text)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self._refuse("the values themselves are asked for")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs or ufunc.nout != 1:
            self._refuse(f"np.{ufunc.__name__} is taken with `{method}` or options")
        return computed(self._tracer, ufunc, inputs, {}, ufunc.__name__)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in _FUNCTIONS:
            self._refuse(f"np.{func.__name__} is taken")
        return computed(self._tracer, func, args, kwargs, func.__name__)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and type(args[0]) is not HostArray:  # x[permutation], x[permutation, 0]
            keys = args[1] if type(args[1]) is tuple else (args[1],)
            found = [one.tensor() if type(one) is HostArray and one.dtype.kind in "bi" else one for one in keys]
            if not any(type(one) is HostArray for one in found):
                return args[0][tuple(found)]
        array = next(one for one in (*args, *(kwargs or {}).values(), *_inside(args)) if type(one) is HostArray)
        return array._refuse(f"torch's {getattr(func, '__name__', func)} is taken")

    def __getitem__(self, key: Any) -> Any:
        keys = key if type(key) is tuple else (key,)
        if not all(type(one) in (int, type(None), type(...)) or (type(one) is slice and _is_plain(one)) for one in keys):
            self._refuse("entries are taken that are no plain numbers and slices")
        self._value[key]  # an IndexError is the right answer
        return self._then(lambda value: value[key], f"[{key}]")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse("entries are assigned")

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> bool:
        if self.size != 1:
            bool(self._value)  # which raises what numpy raises
        return self._then(bool, "bool")

    def __copy__(self) -> HostArray:
        return self._then(np.array, "copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> HostArray:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("a copy or pickle is made")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        getattr(self._value, name)  # an AttributeError is the right answer
        if name not in _METHODS:
            self._refuse(f"`{name}` is asked for")

        def method(*args: Any, **kwargs: Any) -> Any:
            return self._then(lambda value, *given, **named: getattr(value, name)(*given, **named), name, *args, **kwargs)

        return method

    def tolist(self) -> list[Any]:
        """The numbers as lists, each another one for each step."""
        return [one.tolist() if type(one) is HostArray else one for one in self]


def computed(tracer: ScalarTracer, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], text: str) -> Any:
    """A function of arrays, counters and plain values, as an array or number for each step; a guard where it gives a bool.

    Raises:
        CaptureError: there is something else among its arguments.
    """
    arrays = [one for one in (*args, *_inside(args)) if type(one) is HostArray]
    for one in (*args, *kwargs.values()):
        if not _is_operand(one):
            arrays[0]._refuse(f"{text} is computed with a {type(one).__name__}")
    if any(not _is_plain(one) for one in kwargs.values()):
        arrays[0]._refuse(f"{text} is computed with options that change")
    for one in arrays:
        one._check()

    def expression(host_values: HostValues) -> Any:
        return _number(function(*[_value(one, lambda leaf: leaf._expression(host_values)) for one in args], **kwargs))

    now = _number(function(*[_value(one, lambda leaf: leaf._value) for one in args], **kwargs))
    text = f"{text}({', '.join([*map(_text, args), *(f'{name}={one!r}' for name, one in kwargs.items())])})"
    if type(now) is bool:
        return tracer.guard(expression, text)
    if type(now) in (int, float):
        return HostScalar(tracer, expression, text, now)
    if not is_array(now):
        arrays[0]._refuse(f"{text} is a {type(now).__name__}")
    # Views share memory. What does not is treated as if it did: it is refused where that would matter.
    return HostArray(tracer, expression, text, now, [tensors for one in arrays for tensors in one._shared])


def of_numbers(numbers: list[HostScalar]) -> HostArray:
    """An array of numbers that are others for each step."""
    expressions = [one._expression for one in numbers]
    text = f"array({', '.join([one._text for one in numbers])})"
    return HostArray(
        numbers[0]._tracer,
        lambda host_values: np.array([one(host_values) for one in expressions]),
        text,
        np.array([one._value for one in numbers]),
    )


def _value(one: Any, of: Callable[[Any], Any]) -> Any:
    if type(one) in (list, tuple):
        return type(one)(_value(part, of) for part in one)
    return of(one) if type(one) in (HostArray, HostScalar) else one


def _text(one: Any) -> str:
    if type(one) in (list, tuple):
        return f"({', '.join(map(_text, one))})"
    return one._text if type(one) in (HostArray, HostScalar) else repr(one)


def _inside(args: Any) -> Iterator[Any]:
    for one in args:
        if type(one) in (list, tuple):
            yield from one


def _is_operand(one: Any) -> bool:
    if type(one) in (list, tuple):
        return all(type(part) in (HostArray, HostScalar) or _is_plain(part) for part in one)
    return type(one) in (HostArray, HostScalar) or _is_plain(one)


def _is_plain(one: Any) -> bool:
    if type(one) is slice:
        return all(map(_is_plain, (one.start, one.stop, one.step)))
    if type(one) in (tuple, torch.Size):
        return all(map(_is_plain, one))
    return type(one) in _PLAIN or issubclass(type(one), np.generic | np.dtype)


def _number(value: Any) -> Any:
    is_one = isinstance(value, np.generic) or (type(value) is np.ndarray and value.ndim == 0)
    return value.item() if is_one and value.dtype.kind in _KINDS else value


_METHODS = frozenset(
    {
        *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "copy", "cumprod", "cumsum", "flatten", "item", "max"),
        *("mean", "min", "prod", "ravel", "repeat", "reshape", "round", "squeeze", "std", "sum", "transpose", "var"),
    }
)
"""Methods that change nothing and give arrays of a shape that does not depend on the values."""
_FUNCTIONS = frozenset(
    {
        *(
            np.all,
            np.any,
            np.argmax,
            np.argmin,
            np.argsort,
            np.clip,
            np.concatenate,
            np.cumsum,
            np.expand_dims,
            np.hstack,
            np.max,
        ),
        *(np.maximum, np.mean, np.min, np.minimum, np.ravel, np.reshape, np.round, np.sort, np.squeeze, np.stack, np.std, np.sum),
        *(np.swapaxes, np.transpose, np.var, np.vstack),
    }
)


def _binary(ufunc: Any, *, swap: bool = False) -> Any:
    def method(self: HostArray, other: Any) -> Any:
        return computed(self._tracer, ufunc, (other, self) if swap else (self, other), {}, ufunc.__name__)

    return method


def _in_place(self: HostArray, other: Any) -> NoReturn:
    self._refuse("it is changed in place")


_OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}
for _name, _ufunc in _OPERATORS.items():
    setattr(HostArray, f"__{_name}__", _binary(_ufunc))
    setattr(HostArray, f"__r{_name}__", _binary(_ufunc, swap=True))
    setattr(HostArray, f"__i{_name}__", _in_place)
for _name, _ufunc in _COMPARISONS.items():
    setattr(HostArray, f"__{_name}__", _binary(_ufunc))
for _name, _ufunc in {"neg": np.negative, "pos": np.positive, "abs": np.absolute, "invert": np.invert}.items():
    setattr(HostArray, f"__{_name}__", lambda self, ufunc=_ufunc: computed(self._tracer, ufunc, (self,), {}, ufunc.__name__))
