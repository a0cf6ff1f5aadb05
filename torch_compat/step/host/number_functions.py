"""Functions that take only true Python numbers, in a captured step: ``torch.tensor(batch_idx)``, ``math.cos(batch_idx)``."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_compat.step.host.arrays import HostArray, of_numbers
from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.host_memory import made_of
from torch_compat.step.host.later_text import check_kept
from torch_compat.step.host.offsets import width
from torch_compat.step.host.scalars import HostScalar
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows
from xlatrain.bridge.patches import patched
from xlatrain.bridge.torchscript import scripting_with

_MATHS = (
    *("exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "erf", "degrees", "radians", "fabs"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
)
_SIZED = ("expand", "new_empty", "new_ones", "new_zeros", "roll")
"""Methods whose sizes torch looks at before it asks :class:`HostScalar` for them."""


_FACTORIES = {id(getattr(torch, name)): name for name in ("tensor", "as_tensor", "asarray", "scalar_tensor", "from_numpy")}
_FEW = 4
"""Numbers of a list that are one input each; more of them are an array together."""


@contextlib.contextmanager
def taking_host_scalars() -> Iterator[None]:
    """Let torch's factories and ``math`` take counters and drawn numbers, which become inputs of the program."""
    functions: list[tuple[Any, str, Any]] = [(math, name, _mapped(getattr(math, name))) for name in _MATHS]
    functions += [(math, name, _looking(getattr(math, name))) for name in ("isnan", "isinf", "isfinite")]
    taking_lists = ("tensor", "as_tensor", "asarray", "scalar_tensor")
    functions += [(torch, name, _of_arrays(_making(getattr(torch, name)))) for name in taking_lists]
    functions.append((torch, "from_numpy", _of_arrays(_from_numpy(torch.from_numpy))))
    functions += [
        (torch, name, _of_exact_size(getattr(torch, name))) for name in ("zeros", "ones", "empty", "rand", "randn", "roll")
    ]
    functions.append((torch, "arange", _counting(torch.arange)))
    functions.append((torch.jit, "script", scripting_with([(owner, name, getattr(owner, name)) for owner, name, _ in functions])))
    for kind in (FunctionalTensor, FakeTensor):
        functions.append((kind, "new_tensor", _new_tensor))
        functions += [(kind, name, _of_exact_size(getattr(torch.Tensor, name))) for name in _SIZED]
    with patched(functions):
        yield


def _mapped(function: Callable[..., float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if len(args) == 1 and type(args[0]) is HostFuture and (drawn := args[0].drawn()) is not None:
            return drawn.mapped(function)
        return args[0].mapped(function) if len(args) == 1 and type(args[0]) is HostScalar else function(*args)

    return call


def _looking(function: Callable[[Any], bool]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def call(number: Any) -> Any:
        return number.looked_at(function) if type(number) is HostFuture else function(number)

    return call


def _making(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, dtype: torch.dtype | None = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        if args and type(args[0]) is HostArray:
            return args[0].tensor(dtype).requires_grad_(requires_grad)
        if args and _holds_numbers(args[0]) and not _refuses(args[0], dtype):
            tensor = _as_tensor(args[0])
            if dtype is None and factory.__name__ == "scalar_tensor":
                dtype = torch.get_default_dtype()
            return tensor.to(dtype or tensor.dtype, copy=True).requires_grad_(requires_grad)
        given = kwargs if dtype is None else {**kwargs, "dtype": dtype}
        return factory(*args, **({**given, "requires_grad": True} if requires_grad else given))

    return make


def _of_arrays(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        return factory(*args, **kwargs) if args and type(args[0]) is HostArray else made_of(factory, *args, **kwargs)

    return make


def _from_numpy(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        given: Any = args[0] if len(args) == 1 else None
        if type(given) is HostFuture and isinstance(given, np.ndarray) and (read := given.read_of()) is not None:
            return read.clone()
        return given.tensor() if type(given) is HostArray else function(*args, **kwargs)

    return make


def _of_exact_size(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        return factory(*map(_exact, args), **{name: _exact(one) for name, one in kwargs.items()})

    return make


def _counting(arange: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.arange``: as many numbers from a place on as for every step are its first ones moved there."""

    @functools.wraps(arange)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        count = width(*args) if len(args) == 2 and kwargs.get("out") is None else None
        if count is None:
            return arange(*args, **kwargs)
        start, dtype = args[0].tensor(), kwargs.pop("dtype", None) or torch.int64
        return (arange(count, **kwargs) + start).to(dtype)

    return make


def _exact(argument: Any) -> Any:
    return argument.__index__() if type(argument) is HostScalar else argument


def _new_tensor(like: torch.Tensor, data: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    if _holds_numbers(data):
        return torch.tensor(data, dtype=dtype or like.dtype, **kwargs)
    copy = np.array(data) if type(data) is np.ndarray else data  # a constant must not be an array that is put back
    return torch.Tensor.new_tensor(like, copy, dtype=dtype, **kwargs)


def _holds_numbers(data: Any) -> bool:
    """Whether there are counters, drawn numbers, numbers of a tensor of the step or, in a list, such tensors in it."""
    if type(data) in (list, tuple):
        return any(is_traced(one) or _holds_numbers(one) for one in data)
    return type(data) in (HostScalar, HostArray) or (type(data) is HostFuture and data.read_of() is not None)


def _refuses(data: Any, dtype: torch.dtype | None) -> bool:
    """Whether torch refuses tensors in a list for numbers of this dtype: ``torch.tensor([loss], dtype=torch.long)``."""
    if type(data) in (list, tuple):
        return any(_refuses(one, dtype) for one in data)
    if not is_traced(data):
        return False
    fractions = data.is_floating_point() or data.is_complex()
    return data.numel() != 1 or (fractions and dtype is not None and not (dtype.is_floating_point or dtype.is_complex))


def _as_tensor(data: Any) -> torch.Tensor:
    """``data`` as torch infers it: int64 where all is whole, else the default dtype."""
    if type(data) is HostArray:
        return data.tensor()
    if is_traced(data):
        return data.detach().reshape(())  # one number: torch asks each for its item
    if type(data) in (HostScalar, HostFuture):
        tensor = data.tensor() if type(data) is HostScalar else data.read_of()
        if isinstance(data, np.ndarray):
            return tensor
        if tensor.is_floating_point():
            return tensor.to(torch.get_default_dtype())
        return tensor if tensor.dtype == torch.bool or tensor.is_complex() else tensor.to(torch.int64)
    if type(data) not in (list, tuple) or not _holds_numbers(data):
        return torch.tensor(data)
    if len(data) > _FEW and all(type(one) is HostScalar for one in data):
        array = of_numbers(list(data))
        return array.tensor(torch.get_default_dtype() if array.dtype.kind == "f" else None)
    parts = [_as_tensor(one) for one in data]
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.stack([part.to(dtype) for part in parts])


def as_float(*args: Any) -> Any:
    """``float(*args)`` in a captured step: of a value that the running step, the host after it or the state knows, a value that
    comes later; a counter stays one."""
    value: Any = args[0] if len(args) == 1 else None
    check_kept(float, args, {})
    if is_traced(value) and value.numel() == 1:
        value = value.item()
    if type(value) is HostFuture and (value.is_of_host() or value.stays_a_number() or (value.is_of_state() and value.may_move())):
        return value.as_float()
    return value.mapped(float) if type(value) is HostScalar else float(*args)


def as_int(*args: Any) -> Any:
    """``int(*args)`` in a captured step: a counter, a number that is drawn, or one that the state tells stays an expression."""
    value: Any = args[0] if len(args) == 1 else None
    check_kept(int, args, {})
    if type(value) is HostScalar:
        return value.as_int()
    if is_traced(value) and value.numel() == 1 and not (value.is_floating_point() or value.is_complex()):
        value = value.item()
    if type(value) is HostFuture:
        if value.as_offset is not None and value.is_of_state() and value.may_move():
            return value
        if value is not args[0]:
            value.drop_unused()
    return int(*args)


def length_of(*args: Any) -> Any:
    """``len(*args)`` in a captured step: of rows that a mask selects a value that comes later."""
    return args[0].size(0) if len(args) == 1 and type(args[0]) is MaskedRows else len(*args)


def constructor(kind: Any) -> Callable[..., Any] | None:
    """A class of tensors, ``np.array``, or a function of torch that was imported by name, that also takes numbers of the step.

    None for anything else.
    """
    if (name := _FACTORIES.get(id(kind))) is not None:
        return getattr(torch, name)
    if kind is np.array or kind is np.asarray:
        return _constructing(of_lists(kind), lambda array, **options: array._then(np.array, "array", **options))
    if kind is torch.Tensor or (isinstance(kind, type) and type(kind) is type(torch.FloatTensor)):
        dtype = torch.get_default_dtype() if kind is torch.Tensor else kind.dtype
        return _constructing(kind, lambda array: array.tensor(dtype), lambda data: torch.tensor(data, dtype=dtype))
    return None


def _constructing(kind: Any, make: Callable[..., Any], of_list: Callable[..., Any] | None = None) -> Callable[..., Any]:
    @functools.wraps(kind)
    def construct(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if len(args) == 1 else None
        if type(given) is HostArray:
            return make(given, **kwargs)
        if of_list is not None and type(given) in (list, tuple) and _holds_numbers(given):
            return of_list(given)
        return kind(*args, **kwargs) if of_list is None else made_of(kind, *args, **kwargs)

    return construct


def of_lists(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy: of a list with values that come later (``np.mean([a.item(), b.item()])``) a value that comes later."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        lists = [arg for arg in args if type(arg) in (list, tuple, deque)]
        lists += [one for arg in lists for one in arg if type(one) in (list, tuple)]
        later = next((one for arg in lists for one in arg if type(one) is HostFuture), None)
        return function(*args, **kwargs) if later is None else later.given_to(function, *args, **kwargs)

    return call


def extreme_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """``min`` or ``max`` in a captured step: of counters and numbers of one type, an expression."""

    def extreme(*args: Any, **kwargs: Any) -> Any:
        kinds = {one.__class__ for one in args}
        first = next((one for one in args if type(one) is HostScalar), None)
        numbers = all(type(one) in (int, float, HostScalar) for one in args)  # a value of the step is compared: that is known
        if first is None or kwargs or len(args) < 2 or not numbers or kinds not in ({int}, {float}):
            return function(*args, **kwargs)
        return first.of_several(function, args)

    return extreme
