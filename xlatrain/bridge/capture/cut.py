"""The part of a run that leads to one tensor, cut out of it: a function of what the run was given, in plain torch on the host.

While a step runs on fake tensors its Python may ask for the value of one. Where that depends on nothing, or on inputs whose
values are at hand (a batch), the ops that led to it are run again on these: now, for the Python that asks, and before each later
step, to see whether the answer is still the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from xlatrain.bridge.capture.op_facts import OpFacts
from xlatrain.bridge.capture.op_log import argument_text, leaves_of, written_by
from xlatrain.bridge.errors import user_line
from xlatrain.bridge.random import drawn_by_torch, moves
from xlatrain.bridge.tensors.constants import SMALL, contents_of

_aten = torch.ops.aten
_PLAIN = ("aten", "prims")
_REAL = (torch.Tensor, torch.nn.Parameter)
_FILLED: dict[Any, Callable[[Sequence[Any]], Any]] = {
    _aten.zeros_like.default: lambda args: 0,
    _aten.ones_like.default: lambda args: 1,
    _aten.empty_like.default: lambda args: 0,
    _aten.full_like.default: lambda args: args[1],
    _aten.new_zeros.default: lambda args: 0,
    _aten.new_ones.default: lambda args: 1,
    _aten.new_empty.default: lambda args: 0,
    _aten.new_full.default: lambda args: args[2],
}
"""Ops that use only the shape and the dtype of their first argument, and the number that their result is full of."""


_MOST_DRAWN = 1 << 16
"""Numbers that a cut draws; they are drawn once more for the program."""


class UnknownValueError(Exception):
    """The value of a tensor depends on something that is not known before the step; the text says on what."""


class RanOp(Protocol):
    """An op of a run; ``draw`` is the number of its first random draw, of ``draws``."""

    @property
    def facts(self) -> OpFacts: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def result(self) -> Any: ...
    @property
    def draw(self) -> int: ...
    @property
    def draws(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Cut:
    """The ops that lead to a tensor.

    Attributes:
        inputs: which of the run's known inputs they take: the number of a leaf of the batch, the name of anything else.
        constants: tensors from outside of the run that they take; the cut holds for as long as these do not change.
        text: equal for cuts that compute the same.
        where: the user's line that asked.
        function: ``(*inputs, *constants) -> `` the tensor.
    """

    inputs: tuple[int | str, ...]
    constants: tuple[torch.Tensor, ...]
    text: str
    where: str | None
    function: Callable[..., torch.Tensor]

    @property
    def leaves(self) -> tuple[int, ...]:
        """The inputs that are leaves of the batch."""
        return tuple(one for one in self.inputs if isinstance(one, int))

    def value(self, inputs: Mapping[Any, torch.Tensor]) -> torch.Tensor:
        """The tensor, of the values of all known inputs."""
        with torch._C._AutoDispatchBelowAutograd():
            return self.function(*[inputs[index] for index in self.inputs], *self.constants)


@contextlib.contextmanager
def really() -> Iterator[None]:
    """Within the block torch computes with values, also while a run on fake tensors is going on."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        yield


class Answers(Protocol):
    """Where the Python of a run gets the values for which it asks.

    Attributes:
        known: ids of the fake tensors whose values are known, and what a :class:`Cut` calls them.
    """

    @property
    def known(self) -> Mapping[int, int | str]: ...

    def exact(self, cut: Cut, read: Callable[[torch.Tensor], Any], what: str) -> Any:
        """``read`` of the value of a cut, which is assumed to be the same wherever the graph of this run is used.

        Raises:
            UnknownValueError: the inputs' values are not at hand.
        """
        ...

    def outcome(self, tensor: torch.Tensor, found: torch.Tensor, *, likely: int | None = None) -> Any:
        """The value of a tensor of one element that only the running step knows: the run goes on as if that were known.

        ``found`` is the tensor as an int32 scalar, ``likely`` the first guess.

        Raises:
            UnknownValueError: no value may be assumed.
        """
        ...


_RUN: contextvars.ContextVar[Sequence[RanOp] | None] = contextvars.ContextVar("xlatrain_ran_ops", default=None)
_ANSWERS: contextvars.ContextVar[Answers | None] = contextvars.ContextVar("xlatrain_answers", default=None)


@contextlib.contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Within the block a run's Python gets values of tensors."""
    token = _ANSWERS.set(answers)
    try:
        yield
    finally:
        _ANSWERS.reset(token)


@contextlib.contextmanager
def unanswered() -> Iterator[None]:
    """Within the block nobody answers: what runs there is no part of the run that is going on."""
    token = _ANSWERS.set(None)
    try:
        yield
    finally:
        _ANSWERS.reset(token)


@contextlib.contextmanager
def noted(ops: Sequence[RanOp]) -> Iterator[None]:
    """Within the block ``ops`` are those that have run; the run adds to them."""
    token = _RUN.set(ops)
    try:
        yield
    finally:
        _RUN.reset(token)


def ask(tensor: torch.Tensor, read: Callable[[torch.Tensor], Any], what: str) -> Any:
    """``read`` of the value of a tensor of the run that is going on.

    Raises:
        UnknownValueError: it is not known.
    """
    answers = _ANSWERS.get()
    if answers is None:
        raise UnknownValueError("nobody answers")
    return answers.exact(cut_to(tensor), read, what)


def assume(tensor: torch.Tensor, found: Callable[[], torch.Tensor], *, likely: int | None = None) -> Any:
    """A value for a tensor of the run that is going on, where :func:`ask` has none.

    Args:
        tensor: of one element.
        found: makes its value as an int32 scalar of the run; not called where nobody assumes: the run gets no further ops then.
        likely: the first guess, of a whole number.

    Raises:
        UnknownValueError: none may be assumed.
    """
    answers = _ANSWERS.get()
    if answers is None:
        raise UnknownValueError("nobody answers")
    return answers.outcome(tensor, found(), likely=likely)


def cut_to(tensor: torch.Tensor) -> Cut:
    """The ops of the run that is going on which lead to a tensor as it is now.

    Raises:
        UnknownValueError: it depends on more than known inputs.
    """
    answers = _ANSWERS.get()
    return _search(tensor).cut({} if answers is None else answers.known, tensor)


def cut_with_draws(tensor: torch.Tensor) -> Cut:
    """The ops that lead to a tensor which comes of draws from torch's generator alone, with all draws before these.

    Its value is the step's where the generator is where it was when the step began; the cut moves it on.

    Raises:
        UnknownValueError: it depends on anything else, draws before it do, or torch does not draw for this run.
    """
    if not drawn_by_torch() or moves():
        raise UnknownValueError("torch does not draw, or draws from a state that the run has set")
    return _search(tensor, with_draws=True).cut({}, tensor)


def _search(tensor: torch.Tensor, *, with_draws: bool = False) -> _Search:
    ops = _RUN.get()
    if ops is None:
        raise UnknownValueError("the run is not recorded")
    found = _Search(tensor, with_draws=with_draws)
    for op in reversed(ops):
        found.look(op)
    return found


class _Search:
    """Goes back through a run, from the last op to the first, and keeps those that matter.

    An op matters if it made a tensor that is needed, or wrote to the memory of one; ``with_draws``, also if it moves torch's
    generator before one that does so and matters.
    """

    def __init__(self, tensor: torch.Tensor, *, with_draws: bool) -> None:
        self._with_draws = with_draws
        self._drawn = 0
        self._next: int | None = None  # the draw before which all are needed that the run has made
        self._ops: list[RanOp] = []
        self._needed: dict[int, torch.Tensor] = {}
        self._memory: set[int] = set()
        self._need(tensor)

    def _need(self, tensor: torch.Tensor) -> None:
        self._needed[id(tensor)] = tensor
        self._memory.add(tensor.untyped_storage()._cdata)

    def look(self, op: RanOp) -> None:
        made = [one for one in leaves_of((op.result,)) if isinstance(one, torch.Tensor) and id(one) in self._needed]
        facts = op.facts
        moves_on = bool(op.draws or facts.draws) and self._next is not None
        if not made and not moves_on and not self._writes(op):
            return
        if not facts.plain or facts.draws or facts.unsaid or facts.func.namespace not in _PLAIN:
            raise UnknownValueError(f"{facts.name} is more than a function of its arguments")
        if facts.seeded:
            self._draw(op)
        self._ops.append(op)
        for one in made:
            del self._needed[id(one)]
        for one in _operands(op):
            self._need(one)

    def _draw(self, op: RanOp) -> None:
        given = (*op.args, *op.kwargs.values())
        follow = self._next is None or self._next == op.draw + op.draws
        if not self._with_draws or not follow or any(isinstance(one, torch.Generator) for one in given):
            raise UnknownValueError(f"{op.facts.name} draws at random")
        self._next = op.draw
        made = [one for one in leaves_of((op.result,)) if isinstance(one, torch.Tensor)]
        if not all(one.is_contiguous() for one in made):  # what is full of a number has another order in a cut
            raise UnknownValueError("torch draws in the order of memory")
        self._drawn += sum([one.numel() for one in made])
        if self._drawn > _MOST_DRAWN:
            raise UnknownValueError("so many numbers are drawn before it that to draw them twice would take long")

    def _writes(self, op: RanOp) -> bool:
        if not op.facts.mutable:
            return False
        return any(one.untyped_storage()._cdata in self._memory for one in written_by(op.facts.func, op.args, op.kwargs))

    def cut(self, known: Mapping[int, int | str], tensor: torch.Tensor) -> Cut:
        """Make the cut of what was found, with the first op first.

        Raises:
            UnknownValueError: a needed tensor has no known value.
        """
        if self._next:
            raise UnknownValueError("something else draws before")
        inputs: dict[int, int | str] = {}
        constants: dict[int, torch.Tensor] = {}
        for number, one in self._needed.items():
            if number in known:
                inputs[number] = known[number]
            elif type(one) in _REAL:
                constants[number] = one
            else:
                raise UnknownValueError("it depends on values that are known only while the step runs")
        writer = _Writer(list(inputs), constants, copied=any(op.facts.mutable for op in self._ops))
        for op in reversed(self._ops):
            writer.add(op)
        where = user_line(traceback.extract_stack())
        function = writer.function(tensor)  # which tensor is returned is a part of the text
        text = "\n".join([*map(repr, inputs.values()), writer.text()])
        return Cut(tuple(inputs.values()), tuple(constants.values()), text, where, function)


def _operands(op: RanOp) -> Iterator[torch.Tensor]:
    """The tensors whose values an op uses."""
    args = op.args[1:] if op.facts.func in _FILLED else op.args
    for one in leaves_of((args, op.kwargs)):
        if isinstance(one, torch.Tensor):
            yield one


class _Writer:
    """Writes ops down as a Python function: called before every step, it should cost no more than the ops.

    Args:
        inputs: ids of the tensors that are its first arguments.
        constants: by id, those that are its last.
        copied: whether it works on copies of its arguments, since its ops write to them.
    """

    def __init__(self, inputs: Sequence[int], constants: Mapping[int, torch.Tensor], *, copied: bool) -> None:
        self._names = {number: f"v{place}" for place, number in enumerate((*inputs, *constants))}
        self._arguments = list(self._names.values())
        self._made = len(self._names)
        self._others: dict[str, Any] = {}
        self._texts = [_text(one) for one in constants.values()]
        self._lines = [f"{name} = {name}.clone()" for name in self._arguments] if copied else []

    def add(self, op: RanOp) -> None:
        func, args, kwargs = op.facts.func, op.args, op.kwargs
        if func in _FILLED:
            fill = _FILLED[func](args)
            func, args, kwargs = _aten.full.default, ([*op.result.shape], fill), {"dtype": op.result.dtype}
        elif kwargs.get("dtype", _left_out(op)) is None and isinstance(op.result, torch.Tensor):
            kwargs = {**kwargs, "dtype": op.result.dtype}  # else the default dtype of then
        given = [self._value(one) for one in args] + [f"{name}={self._value(one)}" for name, one in kwargs.items()]
        made = f"v{self._made}"
        self._made += 1
        self._lines.append(f"{made} = {self._other(func)}({', '.join(given)})")
        if isinstance(op.result, torch.Tensor):
            self._names[id(op.result)] = made
        else:
            for place, one in enumerate(op.result):
                if isinstance(one, torch.Tensor):
                    self._names[id(one)] = f"{made}[{place}]"

    def _value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._names[id(value)]
        if isinstance(value, list | tuple):
            return f"[{', '.join([self._value(one) for one in value])}]"
        return repr(value) if type(value) in (int, bool, str, type(None)) else self._other(value)

    def _other(self, value: Any) -> str:
        name = f"c{len(self._others)}"
        self._others[name] = value
        return name

    def text(self) -> str:
        return "\n".join(
            [*self._texts, *self._lines, *[f"{name} = {_other_text(value)}" for name, value in self._others.items()]]
        )

    def function(self, result: torch.Tensor) -> Callable[..., torch.Tensor]:
        self._lines.append(f"return {self._names[id(result)]}")
        body = "\n    ".join(self._lines)
        namespace = dict(self._others)
        exec(f"def cut({', '.join(self._arguments)}):\n    {body}", namespace)
        return namespace["cut"]


def _left_out(op: RanOp) -> Any:
    """None where an op may have its dtype from the default one, since none was given."""
    return None if any(one.kwarg_only and one.name == "dtype" for one in op.facts.func._schema.arguments) else ...


def _other_text(value: Any) -> str:
    """Text of an op, or of an argument that is no literal of Python."""
    return str(value) if isinstance(value, torch._ops.OpOverload) else argument_text(value, "an op")


def _text(tensor: torch.Tensor) -> str:
    values = contents_of(tensor) if tensor.nbytes <= SMALL else f"{tensor.data_ptr()} {tensor._version}"
    return f"{tensor.dtype}{tuple(tensor.shape)} {values}"
