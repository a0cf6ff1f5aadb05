"""Host calls of executed steps that wait to be made: the loop need not wait for the device to bring a metric up to date."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_compat.step.host.calls import HostCall
from torch_compat.step.host.slots import ValueSlot

_LAG = 8  # steps: as many programs as are in flight, so that what is read then is there


@dataclass
class StepCalls:
    """The host calls of one executed step.

    Attributes:
        calls: the calls, in order.
        fill: puts the step's real values into their arguments.
        results: the results of the calls made so far.
    """

    calls: Sequence[HostCall]
    fill: Callable[[Any], Any]
    results: list[Any] = field(default_factory=list)

    def make(self) -> None:
        """Make the calls."""
        for call in self.calls:
            self.results.append(call.make(self.fill))
        self.fill = _made  # lets go of the step's outputs


def _made(tree: Any) -> Any:
    raise AssertionError("host calls are made once")


class PendingCalls:
    """Makes host calls in order, late where that cannot be noticed.

    Calls that change nothing but the state of certain objects (metrics) wait for up to some steps. Meanwhile any look at one of
    these objects makes all calls that wait first: its class is exchanged for one whose attributes do so.

    Args:
        lag: the number of steps whose calls may wait; 0 on several processes, where metrics talk to each other.
    """

    def __init__(self, lag: int = _LAG) -> None:
        self._lag = lag
        self._waiting: deque[StepCalls] = deque()
        self._trapped: dict[int, tuple[Any, type]] = {}
        self._making = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run in the block; at its end no call waits any more."""
        try:
            yield
            self.make_all()
        finally:
            self._release()
            self._waiting.clear()

    def add(self, step: StepCalls) -> None:
        """The calls of the latest step, to be made now or later."""
        if not step.calls:
            return
        self._waiting.append(step)
        if self._lag == 0 or any(call.state is None or not call.state for call in step.calls):
            self.make_all()
        elif len(self._waiting) > self._lag:
            self._make(self._lag // 2)
            self._trap()
        else:
            self._trap()

    def make_all(self) -> None:
        """Make every call that waits."""
        if not self._making:
            self._make(len(self._waiting))

    def result(self, step: StepCalls, slot: ValueSlot) -> Any:
        """A result of a step's calls, which are made if they wait."""
        if len(step.results) < len(step.calls):
            self.make_all()
        return slot.find(step.results)

    def _make(self, count: int) -> None:
        self._release()
        self._making = True
        try:
            for _ in range(count):
                self._waiting.popleft().make()
        finally:
            self._making = False

    def _trap(self) -> None:
        for call in self._waiting[-1].calls:
            for owner in call.state or ():
                if id(owner) not in self._trapped:
                    kind = type(owner)
                    self._trapped[id(owner)] = (owner, kind)
                    object.__setattr__(owner, "__class__", _waiting_class(kind))
                    _OWNERS[id(owner)] = self

    def _release(self) -> None:
        for identity, (owner, kind) in self._trapped.items():
            object.__setattr__(owner, "__class__", kind)
            _OWNERS.pop(identity, None)
        self._trapped.clear()


_OWNERS: dict[int, PendingCalls] = {}


@functools.cache
def _waiting_class(kind: type) -> type:
    """A subclass of ``kind`` whose every attribute first makes the calls that wait."""

    def bring_up_to_date(self: Any) -> None:
        pending = _OWNERS.get(id(self))
        if pending is not None:
            pending.make_all()

    def read(self: Any, name: str) -> Any:
        bring_up_to_date(self)
        return getattr(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        bring_up_to_date(self)
        setattr(self, name, value)

    def special(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            bring_up_to_date(self)
            return getattr(type(self), name)(self, *args, **kwargs)

        return method

    methods: dict[str, Any] = {name: special(name) for name in _SPECIAL if hasattr(kind, name)}
    members = {"__getattribute__": read, "__setattr__": write, "__module__": kind.__module__, **methods}
    return type(kind)(kind.__name__, (kind,), members)


_SPECIAL = ("__call__", "__getitem__", "__iter__", "__len__", "__contains__", "__hash__", "__repr__", "__deepcopy__")
