"""Numbers of Python that a step gives to ops, as inputs of its program where they are others from batch to batch.

Whoever runs a step's Python for every batch knows its numbers before each program. A number that was another in an earlier run
makes no other program then: the op gets an input in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.scalar_plan import SLOTS
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from torch_compat.step.values.marks import mark

_OPERATORS = ("add", "sub", "mul", "truediv", "lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC = frozenset(
    {
        *(f"{before}{name}__" for name in _OPERATORS for before in ("__", "__r", "__i")),
        *(f"{name}{after}" for name in ("add", "sub", "mul", "div") for after in ("", "_")),
        *("rsub", "multiply", "subtract", "divide", "true_divide", "where", "lt", "le", "gt", "ge", "eq", "ne"),
        *("less", "less_equal", "greater", "greater_equal", "not_equal"),
    }
)
"""Functions of torch that do the same with a tensor in place of a number."""
_FACTORIES = frozenset({"tensor", "as_tensor", "scalar_tensor"})
_WHOLE = 1 << 31
_MOST = SLOTS - 4  # the others are for counters


class ChangingNumbers:
    """The numbers that the runs of one step have given to ops, in order."""

    def __init__(self) -> None:
        self._first: list[Any] = []
        self._changing: set[int] = set()

    def lifting(self, tracer: ScalarTracer) -> TorchFunctionMode:
        """The mode of a run, in which those that have changed are inputs."""
        return _Lifting(self, tracer)

    def changes(self, place: int, number: float) -> bool:
        """Whether the number at this place among all that are given to ops has been another."""
        if place == len(self._first):
            self._first.append(number)
        elif len(self._changing) < _MOST and mark(number) != mark(self._first[place]):
            self._changing.add(place)
        return place in self._changing


class _Lifting(TorchFunctionMode):
    def __init__(self, numbers: ChangingNumbers, tracer: ScalarTracer) -> None:
        super().__init__()
        self._numbers = numbers
        self._tracer = tracer
        self._place = 0
        self._lifted_so_far: dict[Any, HostScalar] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        for one in args:
            if type(one) is HostFuture:
                with self:  # its arithmetic has numbers, too
                    one.tensor()
        if name in _ARITHMETIC and any(map(is_traced, args)):
            lifted = tuple(map(self._lifted, args))
            if any(type(one) is HostScalar for one in lifted):
                return HostScalar.__torch_function__(func, types, lifted, kwargs)
        elif name in _FACTORIES and len(args) == 1 and type(lifted := self._lifted(args[0])) is HostScalar:
            return getattr(torch, name)(lifted, **kwargs)
        return func(*args, **kwargs)

    def _lifted(self, argument: Any) -> Any:
        kind = type(argument)
        if kind is not float and (kind is not int or not -_WHOLE < argument < _WHOLE):
            return argument
        if torch._C._current_graph_task_id() != -1:  # a checkpoint computes once more what has been computed
            return self._lifted_so_far.get(mark(argument), argument)
        self._place += 1
        if not self._numbers.changes(self._place - 1, argument):
            return argument
        made = HostScalar(self._tracer, lambda host_values: argument, f"number {self._place} of the step", argument)
        self._lifted_so_far[mark(argument)] = made
        return made
