"""Numbers, and arrays of them, that a step draws from Python's or numpy's random generators: drawn anew for every step.

While a step is captured the draws are noted: which generator, which method, which arguments. Before each later step they are
made again, in the same order, and their numbers are inputs of the program, as the loop's counters are. The streams are stock's.
A clock (``time.time()``) is read in the same way, once in a step: how long a part of it takes nobody can see from outside.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
import traceback
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jax.extend.core import get_opaque_trace_state

from torch_compat.step.host.arrays import HostArray, is_array
from torch_compat.step.host.host_values import Expression, HostValues
from torch_compat.step.host.input_functions import FunctionCall
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from torch_compat.step.values.generators import same_state, set_state, state_of
from xlatrain.bridge.capture.cut import Cut, really
from xlatrain.bridge.errors import CaptureError, is_user_file, user_line
from xlatrain.bridge.patches import patched

_T = TypeVar("_T")

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_PYTHON, _NUMPY = random._inst, np.random.mtrand._rand  # pyright: ignore[reportAttributeAccessIssue]
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
"""Functions of Python's ``time``; one that somebody has replaced is a function like any other."""
_NO_DRAWS = frozenset({"getstate", "setstate", "get_state", "set_state", "bit_generator", "spawn"})


@dataclass(frozen=True)
class Draw:
    """A draw of a random number, or of an array or list of numbers; the step knows it as ``name``.

    ``form`` is the shape and dtype of an array, the length of a list.
    """

    generator: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    form: Any = None

    @property
    def generators(self) -> tuple[Any, ...]:
        """The generators that it moves on."""
        return () if self.generator is time else (self.generator,)

    @property
    def text(self) -> str:
        """The draw in words."""
        return f"{self.name} {self.args} {self.kwargs} of {id(self.generator)}"

    def make(self, host_values: HostValues) -> Any:
        """Draw; ``host_values`` have the numbers of the step that have been drawn before."""
        args = [list(one) if type(one) is list else _resolved(one, host_values) for one in self.args]  # which may be shuffled
        kwargs = {name: _resolved(one, host_values) for name, one in self.kwargs.items()}
        value: Any = getattr(self.generator, self.method)(*args, **kwargs)
        if self.method == "shuffle" and type(args[0]) is list:
            value = args[0]
        if self.form is not None and _form(value) != self.form:
            raise RuntimeError(f"{self.name} gave {_form(value)} where the step was compiled for {self.form}")
        if is_array(value):
            value.setflags(write=False)
        return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True)
class _Computed:
    """An argument of a draw that is computed from numbers drawn before it."""

    expression: Expression
    text: str

    def __repr__(self) -> str:
        return self.text


def _resolved(arg: Any, host_values: HostValues) -> Any:
    return arg.expression(host_values) if type(arg) is _Computed else arg


@dataclass(frozen=True)
class TorchDraw:
    """A read of numbers from torch's generator, which are drawn once more beforehand, as they will be.

    Attributes:
        cut: the draws, all those before them, and what is computed of them.
        read: what is read of its tensor.
    """

    cut: Cut
    read: Callable[[torch.Tensor], Any]
    name: str
    generators = ()

    @property
    def text(self) -> str:
        """The draw in words."""
        return f"{self.name} of\n{self.cut.text}"

    def make(self, host_values: HostValues) -> Any:
        """The value that is read, of the numbers that torch draws next; its generator stays where it is."""
        state = torch.default_generator.get_state()
        try:
            return self.read(self.cut.value({}))
        finally:
            torch.default_generator.set_state(state)


class Draws:
    """The draws of one captured step, in order."""

    def __init__(self, made: Sequence[Draw | TorchDraw | FunctionCall]) -> None:
        self._made = tuple(made)
        self._generators = list({id(one): one for draw in made for one in draw.generators}.values())

    def make(self, host_values: HostValues) -> None:
        """Draw, and put the numbers among those of a step."""
        for draw in self._made:
            host_values.numbers[draw.name] = draw.make(host_values)

    def try_out(self, host_values: HostValues) -> Callable[[], None]:
        """Make the draws, see :meth:`make`, and return a function that takes them back."""
        before = [state_of(generator) for generator in self._generators]
        self.make(host_values)

        def take_back() -> None:
            for generator, state in zip(self._generators, before, strict=True):
                set_state(generator, state)

        return take_back

    def __bool__(self) -> bool:
        return bool(self._made)

    @property
    def texts(self) -> list[str]:
        """The draws in words, in order: two steps that draw otherwise leave generators in other places."""
        return [draw.text for draw in self._made]

    @property
    def names(self) -> frozenset[str]:
        """The names under which the step knows the numbers."""
        return frozenset(draw.name for draw in self._made)


class UnseenDrawError(CaptureError):
    """A step draws by a function that its capture has not seen."""


class DrawRecorder:
    """Notes the draws of the step that is being captured.

    Args:
        tracer: the capture's, in which the numbers are counters.
        host_values: the step's, to whose numbers those that are drawn are added.

    Attributes:
        is_off: whether a function is called whose draws are its own business.
    """

    def __init__(self, tracer: ScalarTracer, host_values: HostValues) -> None:
        self.is_off = False
        self._tracer = tracer
        self._host_values = host_values
        self._made: list[Draw | TorchDraw | FunctionCall] = []
        self._unseen = ""
        self._before: dict[int, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[DrawRecorder]:
        """Note draws from the global generators in the block; on leaving, all generators are where they were.

        Raises:
            CaptureError: a global generator was used past this recorder.
        """
        for generator in (_PYTHON, _NUMPY):
            self._before[id(generator)] = (generator, state_of(generator))
        try:
            functions: list[tuple[Any, str, Any]] = [
                (module, name, self._recorded(generator, name, text))
                for module, generator, text in ((random, _PYTHON, "random"), (np.random, _NUMPY, "np.random"))
                for name in _methods(module, generator)
            ]
            clocks = [name for name in _CLOCKS if isinstance(getattr(time, name), types.BuiltinFunctionType)]
            self._tracer.recorder = self
            watched = self._watched() if self._tracer.watches_draws else contextlib.nullcontext()
            with patched([*functions, *((time, name, self._clock(name)) for name in clocks)]), watched:
                yield self
            self._check()
        finally:
            self._tracer.recorder = None
            for generator, state in self._before.values():
                set_state(generator, state)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Within the block draws by functions that somebody imported by name are seen, too.

        Of beartype's, which choose the entry of a list whose type is checked, nothing in the step depends on the numbers.
        """
        before = sys.getprofile()

        def watch(frame: types.FrameType, event: str, function: Any) -> None:
            owner = getattr(function, "__self__", None) if event == "c_call" else None
            if (owner is not _PYTHON and owner is not _NUMPY) or self.is_off or frame.f_code is Draw.make.__code__:
                return
            if frame.f_code.co_filename.startswith("<@beartype(") and function.__name__ == "getrandbits":
                name = self.new_name("beartype's random.getrandbits")
                self._made.append(Draw(_PYTHON, "getrandbits", (32,), {}, name))
            elif function.__name__ not in _NO_DRAWS:
                self._unseen = self._unseen or f"{frame.f_code.co_filename}:{frame.f_lineno}: {function.__qualname__}()\n  "

        sys.setprofile(watch)
        try:
            yield
        finally:
            sys.setprofile(before)

    def has_drawn(self) -> bool:
        """Whether there were draws so far."""
        return bool(self._made)

    def new_name(self, text: str) -> str:
        """The name of a next draw."""
        return f"{text}() number {len(self._made)}"

    def call(self, made: FunctionCall, first: Callable[[HostValues], tuple[tuple[Any, ...], _T]]) -> tuple[tuple[Any, ...], _T]:
        """``first``, the first call of a function that is called before each step, noted; where it raises nothing has been drawn.

        Raises:
            Exception: that of ``first``.
        """
        before = [(generator, state_of(generator)) for generator in made.generators]
        try:
            with self._off():
                found = first(self._host_values)
        except BaseException:
            for generator, state in before:
                set_state(generator, state)
            raise
        self._made.append(made)
        self._host_values.numbers[made.name] = found[0]
        return found

    def note(self, draw: TorchDraw) -> str:
        """Make a draw and note it; gives its name."""
        with self._off():
            self._host_values.numbers[draw.name] = draw.make(self._host_values)
        self._made.append(draw)
        self._tracer.note_drawn(draw.name)
        return draw.name

    @contextlib.contextmanager
    def _off(self) -> Iterator[None]:
        """Within the block nothing is noted, and torch computes with values."""
        self.is_off = True
        try:
            with really():
                yield
        finally:
            self.is_off = False

    def stand_in(self, generator: Any, text: str) -> Any:
        """The stand-in that the step gets for a generator that it keeps."""
        self._before.setdefault(id(generator), (generator, state_of(generator)))
        return _RecordedGenerator(self, generator, text)

    def _recorded(self, generator: Any, method: str, text: str) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if self.is_off:
                return getattr(generator, method)(*args, **kwargs)
            name = self.new_name(f"{text}.{method}")
            shuffled = args[0] if method == "shuffle" and args else None
            args = tuple(list(map(_exact, arg)) if arg is shuffled and type(arg) is list else _exact(arg) for arg in args)
            kwargs = {key: _exact(arg) for key, arg in kwargs.items()}
            draw = Draw(generator, method, args, kwargs, name)
            value = draw.make(self._host_values)
            form = _form(value)
            is_given = form is not None and any(value is one for one in (*args, *kwargs.values()))  # rng.random(out=buffer)
            if is_given or (form is None and type(value) not in (int, float)):
                raise CaptureError(
                    f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: {text}.{method}() gives "
                    f"{type(value).__name__}, and only numbers, and new arrays and "
                    "lists of them, can be drawn anew for every step.\n"
                    "  Fix: draw with torch (torch.rand, torch.randperm, …) in the step, or draw in a hook or in the dataset."
                )
            self._made.append(replace(draw, form=form))
            self._host_values.numbers[name] = value
            if form is None:
                return self._tracer.drawn(name)
            self._tracer.note_drawn(name)
            if type(value) is list:
                entries = [self._entry(name, index, one) for index, one in enumerate(value)]
                if type(shuffled) is not list:
                    return entries
                shuffled[:] = entries
                return None
            return HostArray(self._tracer, lambda host_values: host_values.numbers[name], name, value)

        draw.draws = True  # pyright: ignore[reportFunctionMemberAccess]
        return draw

    def _entry(self, name: str, index: int, value: Any) -> HostScalar:
        return HostScalar(self._tracer, lambda host_values: host_values.numbers[name][index], f"{name}[{index}]", value)

    def _clock(self, name: str) -> Callable[[], Any]:
        """A clock as the user's own code reads it; a library's readings while capturing are a library's business."""
        clock, thread, trace = getattr(time, name), threading.get_ident(), get_opaque_trace_state(convention="nnx")
        text = f"time.{name}()"

        def read() -> Any:
            if self.is_off or threading.get_ident() != thread or not is_user_file(sys._getframe(1).f_code.co_filename):
                return clock()
            if get_opaque_trace_state(convention="nnx") != trace:  # in a function that JAX traces, where a number is a constant
                return clock()
            if any(type(draw) is Draw and draw.generator is time for draw in self._made):
                raise CaptureError(
                    f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: it reads a clock a second "
                    "time, and how long a part of a compiled step takes cannot be seen from its Python.\n  Fix: read clocks in "
                    "hooks (on_train_batch_start, on_train_batch_end), or use the profiler."
                )
            self._made.append(Draw(time, name, (), {}, text))
            self._host_values.numbers[text] = clock()
            return self._tracer.drawn(text)

        return read

    def _check(self) -> None:
        """Made again from where they were, the noted draws must lead to where the generators are now."""
        after = [state_of(generator) for generator, _ in self._before.values()]
        for generator, state in self._before.values():
            set_state(generator, state)
        draws = Draws(self._made)
        numbers: Any = ChainMap({}, self._host_values.numbers)
        with self._off():
            draws.make(replace(self._host_values, numbers=numbers))
        for (generator, _), state in zip(self._before.values(), after, strict=True):
            if not same_state(state_of(generator), state):
                whose = "numpy" if generator is _NUMPY else "Python"
                raise UnseenDrawError(
                    f"{self._unseen}the step draws from the random generator of {whose} in a way that "
                    "cannot be repeated for every step, such as an installed library's own draws.\n  Fix: call it as "
                    "random.f() or np.random.f() in the step, draw with torch (torch.rand, …), or draw in a hook or dataset."
                )
        self._tracer.plan.draws = draws


def recorded(function: Any) -> Any:
    """A function that records the draws of one of the global generators, also imported by name; None for any other."""
    owner = getattr(function, "__self__", None)
    module = random if owner is _PYTHON else np.random if owner is _NUMPY else None
    found = function if module is None else vars(module).get(function.__name__)
    return found if type(found) is types.FunctionType and vars(found).get("draws") else None


class _RecordedGenerator:
    """A stand-in for a generator of the user's while a step is captured."""

    def __init__(self, recorder: DrawRecorder, generator: Any, text: str) -> None:
        self._recorder = recorder
        self._generator = generator
        self._text = text

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._generator)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._generator, name)
        if name in _NO_DRAWS or not callable(value):
            raise CaptureError(f"the step uses {self._text}.{name}, which a compiled step cannot repeat: draw numbers only")
        return self._recorder._recorded(self._generator, name, self._text)


def _methods(module: Any, generator: Any) -> list[str]:
    """Functions of a module that are methods of its hidden generator."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _NO_DRAWS and getattr(value, "__self__", None) is generator
    ]


def _exact(value: Any) -> Any:
    if type(value) is HostArray:
        np.asarray(value)  # which refuses
    if type(value) is not HostScalar:
        return value
    return _Computed(*value.deferred()) if value.is_drawn else value.item()


def _form(value: Any) -> Any:
    """The form of an array or list that is drawn; None of anything else."""
    if is_array(value):
        return value.shape, value.dtype
    return len(value) if type(value) is list and all(type(one) in (int, float) for one in value) else None
