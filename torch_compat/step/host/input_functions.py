"""Functions that need values and get only what is known before the step: they are called before each, whose inputs they give.

``_compute_mask_indices`` of a speech model draws as many places for each row as the row is long, with numpy, from the sizes and
the mask of the batch. Nothing of that can be traced, and nothing of it has to be. Where a step cannot be captured because of what
such a function does, its call is noted as a draw is (:mod:`torch_compat.step.host.draws`), and what it gives is an input of the
program. A function may be called so that has no state of its own: of a module, without variables of functions around it, which
sets nothing but its own variables, and calls no library that keeps something: it runs more than once for a step.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import dis
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.arrays import HostArray, is_array
from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.host_values import Expression, HostValues
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from xlatrain.bridge.capture.cut import UnknownValueError
from xlatrain.bridge.errors import is_library_file, is_user_file
from xlatrain.cluster.distributed import world

if TYPE_CHECKING:
    from torch_compat.step.host.batch_values import AskedValues
    from torch_compat.step.host.draws import DrawRecorder

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, np.dtype)
_SETS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "IMPORT_NAME"})
_ACTS = frozenset(
    {"print", "open", "input", "exec", "eval", "setattr", "delattr", "globals", "locals", "vars", "breakpoint", "next"}
)
_PURE = frozenset(
    {"builtins", "collections", "copy", "functools", "itertools", "math", "numpy", "operator", "random", "torch", "typing"}
)
_NOT_PLAIN_CALLS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_DEPTH = 8
_ACTIVE: contextvars.ContextVar[InputFunctions | None] = contextvars.ContextVar("xlatrain_input_functions", default=None)


class _NotKnownError(Exception):
    """The function needs something that is not known before the step, or gives what can be no input."""


@dataclass(frozen=True)
class FunctionCall:
    """A call that is made before each step: a kind of draw, whose numbers the step knows as ``name``.

    Attributes:
        function: that.
        args: of ``spec``: plain values, and expressions for what differs from step to step.
        texts: of the arguments.
    """

    function: types.FunctionType
    args: tuple[Any, ...]
    spec: pytree.TreeSpec
    texts: tuple[str, ...]
    name: str

    generators = (random._inst, np.random.mtrand._rand)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def text(self) -> str:
        """The call in words."""
        return f"{self.name} {self.texts} {self.spec} of {id(self.function)}"

    def make(self, host_values: HostValues) -> tuple[Any, ...]:
        """Call it; gives the leaves of what it gives.

        Raises:
            Exception: the function's.
        """
        leaves = [one.of(host_values) if type(one) is _Later else one for one in self.args]
        args, kwargs = pytree.tree_unflatten([_own(one) for one in leaves], self.spec)
        with torch.no_grad():
            return tuple(map(_as_input, pytree.tree_leaves(self.function(*args, **kwargs))))


@dataclass(frozen=True)
class _Later:
    of: Expression


class InputFunctions:
    """The functions of a capture that are called before its step.

    Args:
        functions: that shall be, where what they get is known then.
        tracer: of the capture.
        asked: gives what the batch tells.
    """

    def __init__(self, functions: Sequence[types.FunctionType], tracer: ScalarTracer, asked: AskedValues) -> None:
        self._functions = functions
        self._tracer = tracer
        self._asked = asked

    @contextlib.contextmanager
    def available(self) -> Iterator[None]:
        """Within the block :func:`as_input` knows them."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def of(self, function: Any) -> Callable[..., Any] | None:
        """The function that is called in place of one of these; None for any other."""
        if not any(function is one for one in self._functions):
            return None

        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = self._tracer.recorder
            if recorder is not None and not recorder.is_off:
                with contextlib.suppress(_NotKnownError):
                    return self._called(recorder, function, args, kwargs)
            return function(*args, **kwargs)

        return call

    def _called(self, recorder: DrawRecorder, function: types.FunctionType, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs), _is_size)
        parts = [self._known(one) for one in leaves]
        texts = tuple(text for _, text in parts)
        made = FunctionCall(function, tuple(one for one, _ in parts), spec, texts, recorder.new_name(function.__name__))
        found, out_spec = recorder.call(made, functools.partial(_tried, made))
        forms = tuple(map(_form, found))
        name = made.name
        self._tracer.note_drawn(name)
        self._tracer.guard(lambda host_values: tuple(map(_form, host_values.numbers[name])), f"the forms of {name}")
        return pytree.tree_unflatten(
            [self._input(name, index, one, form) for index, (one, form) in enumerate(zip(found, forms, strict=True))], out_spec
        )

    def _known(self, leaf: Any) -> tuple[Any, str]:
        """An argument as it is known before each step, and its text."""
        kind = type(leaf)
        if kind in _PLAIN or (isinstance(leaf, type) and issubclass(leaf, np.generic | bool | int | float)):
            return leaf, repr(leaf)
        if kind is HostScalar or kind is HostArray:
            of, text = leaf.deferred()
            return _Later(of), text
        if kind is HostFuture:
            known = leaf.known_before()
            if known is not None:
                return _Later(known[0]), known[1]
        elif is_traced(leaf):
            tensor = cast(torch.Tensor, leaf)
            found = None if tensor.requires_grad else self._asked.value_of(tensor, _copy, "tensor")
            if found is not None and not found[2]:
                return _Later(found[0]), found[1]
        raise _NotKnownError

    def _input(self, name: str, index: int, value: Any, form: Any) -> Any:
        def of(host_values: HostValues) -> Any:
            return host_values.numbers[name][index]

        text = f"{name}[{index}]"
        if type(value) in (int, float):
            return HostScalar(self._tracer, of, text, value)
        array = HostArray(self._tracer, of, text, value)
        return array.tensor() if form[0] is torch.Tensor else array


class _Tensor(np.ndarray):
    """The values of a tensor."""


def _tried(made: FunctionCall, host_values: HostValues) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
    """The first call: what it gives, and how that is put together.

    Raises:
        _NotKnownError: it draws from torch's generator, changes what it gets, or gives something else than numbers; or what it
            gets is not on the host.
    """
    try:
        leaves = [one.of(host_values) if type(one) is _Later else one for one in made.args]
    except UnknownValueError:
        raise _NotKnownError from None
    given = pytree.tree_unflatten([_own(one) for one in leaves], made.spec)
    drawn = _state()
    with torch.no_grad():
        found = made.function(*given[0], **given[1])
    after, spec = pytree.tree_flatten(given, _is_size)
    if not torch.equal(drawn, _state()):
        torch.default_generator.set_state(drawn)
        raise _NotKnownError
    if spec != made.spec or not all(map(_same, leaves, after)):
        raise _NotKnownError
    if any(one is other for one in pytree.tree_leaves(found) for other in after if not isinstance(other, _PLAIN)):
        raise _NotKnownError
    results, out_spec = pytree.tree_flatten(found)
    return tuple(map(_as_input, results)), out_spec


def _as_input(value: Any) -> Any:
    """A leaf of a result as an input of programs.

    Raises:
        _NotKnownError: it can be none.
    """
    if type(value) in (int, float):
        return value
    if type(value) is torch.Tensor and _has_array(value):
        array = value.numpy().view(_Tensor)
    elif is_array(value):
        array = cast(np.ndarray, value)
    else:
        raise _NotKnownError
    array.setflags(write=False)
    return array


def _has_array(tensor: torch.Tensor) -> bool:
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad and tensor.ndim > 0
    return is_plain and tensor.dtype != torch.bfloat16 and not tensor.is_complex()


def _form(value: Any) -> tuple[Any, ...]:
    if type(value) in (int, float):
        return (type(value),)
    return (torch.Tensor if type(value) is _Tensor else np.ndarray, value.shape, value.dtype)


def _is_size(value: Any) -> bool:
    """A ``torch.Size`` stays one."""
    return type(value) is torch.Size


def _state() -> torch.Tensor:
    """Where torch's generator is; ``torch.get_rng_state`` gives a stand-in while a step is captured."""
    return torch.default_generator.get_state()


def _own(value: Any) -> Any:
    """A copy of what a function may change."""
    return value.clone() if isinstance(value, torch.Tensor) else value.copy() if isinstance(value, np.ndarray) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one is other


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def as_input(function: Any) -> Callable[..., Any] | None:
    """The function that a step calls in place of one that is called before it; None for any other."""
    active = _ACTIVE.get()
    return None if active is None or type(function) is not types.FunctionType else active.of(function)


def input_functions(error: BaseException) -> tuple[types.FunctionType, ...]:
    """The functions in which an error arose that may be called before each step, if what they get is known then."""
    found: list[types.FunctionType] = []
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        function = frame.f_globals.get(frame.f_code.co_name)
        if type(function) is not types.FunctionType or not _is_of(function, frame.f_code) or not has_no_state(function):
            continue
        if not any(_holds_module(frame.f_locals.get(name)) for name in _arguments(function)):
            found.append(function)
    return tuple(dict.fromkeys(found)) if world().process_count == 1 else ()


def _is_of(function: types.FunctionType, code: types.CodeType) -> bool:
    mine = function.__code__
    if (mine.co_filename, mine.co_firstlineno) != (code.co_filename, code.co_firstlineno):
        return False
    return is_user_file(mine.co_filename) or is_library_file(mine.co_filename)


def _arguments(function: types.FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _holds_module(value: Any) -> bool:
    return any(isinstance(one, torch.nn.Module) for one in pytree.tree_leaves(value))


def has_no_state(function: types.FunctionType, depth: int = 0) -> bool:
    """Whether a function sets nothing but its own variables, and reads nothing that only the step changes."""
    if function.__closure__ or depth > _DEPTH or not all(type(one) in _PLAIN for one in function.__defaults__ or ()):
        return False
    if not all(type(one) in _PLAIN for one in (function.__kwdefaults__ or {}).values()):
        return False
    return _sets_nothing(function.__code__, function, depth)


def _sets_nothing(code: types.CodeType, function: types.FunctionType, depth: int) -> bool:
    if code is function.__code__ and code.co_flags & _NOT_PLAIN_CALLS:
        return False
    for one in dis.get_instructions(code):
        if one.opname in _SETS:
            return False
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") and not _may_be_read(one.argval, function, depth):
            return False
    return all(_sets_nothing(one, function, depth) for one in code.co_consts if isinstance(one, types.CodeType))


def _may_be_read(name: str, function: types.FunctionType, depth: int) -> bool:
    if name not in function.__globals__:
        return name not in _ACTS and hasattr(builtins, name)
    value = function.__globals__[name]
    if value is function or type(value) in _PLAIN or _is_pure(value):
        return True
    if type(value) is not types.FunctionType:
        return False
    file = value.__code__.co_filename
    return (is_user_file(file) or is_library_file(file)) and has_no_state(value, depth + 1)


def _is_pure(value: Any) -> bool:
    """Whether a value is, or is of, a library whose functions keep nothing but random generators."""
    if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | None):
        value = type(value.__self__)  # a generator's method that was imported by name; no list's
        return value.__module__ != "builtins" and _is_pure(value)
    if not isinstance(value, types.ModuleType | type | types.BuiltinFunctionType | types.FunctionType):
        return False
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name).partition(".")[0].removeprefix("_") in _PURE
