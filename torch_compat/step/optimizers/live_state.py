"""``optimizer.state`` during a compiled run: it is on the mesh, and comes to the host when user code asks for it."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_compat.step.optimizers.state import read_exported

_STATE = operator.attrgetter("state")


class LiveOptimizerState(dict[Any, Any]):
    """A stand-in for an optimizer's ``state``: the first access brings the real one to the host.

    Args:
        optimizer: the optimizer.
        open_states: brings to the host the states that stand-ins still stand for.

    Attributes:
        own: the state that the optimizer had before the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, open_states: Callable[[], object]) -> None:
        super().__init__()
        self.own = optimizer.state
        self._optimizer = optimizer
        self._open_states = open_states

    def opened(self) -> Any:
        """The state itself, which user code may change until the next step."""
        if self._optimizer.state is self:
            self._open_states()
        return self._optimizer.state

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.opened().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.opened(), memo)


def _through(name: str) -> Callable[..., Any]:
    def method(self: LiveOptimizerState, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.opened(), name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__"),
    *("get", "items", "keys", "values", "pop", "popitem", "clear", "update", "setdefault", "copy"),
):
    setattr(LiveOptimizerState, _name, _through(_name))


class LiveOptimizerStates:
    """The states of a run's optimizers, while their values are on the mesh.

    Args:
        optimizers: torch's optimizers.
        fetch: writes the states on the mesh into them.
        load: puts their states on the mesh.
    """

    def __init__(self, optimizers: Sequence[Any], fetch: Callable[[], object], load: Callable[[], object]) -> None:
        self._optimizers = [one for one in optimizers if isinstance(one, torch.optim.Optimizer)]
        self._fetch = fetch
        self._load = load
        self._live = [LiveOptimizerState(one, self._open) for one in self._optimizers]
        self._hide()

    def _hide(self) -> None:
        for optimizer, live in zip(self._optimizers, self._live, strict=True):
            optimizer.state = live  # pyright: ignore[reportAttributeAccessIssue]

    def _are_hidden(self) -> bool:
        return all(map(operator.is_, map(_STATE, self._optimizers), self._live))

    def _open(self) -> None:
        """Bring the states to the host of the optimizers that still have a stand-in: the others' are what user code made them."""
        before = [one.state for one in self._optimizers]
        if not any(map(operator.is_, before, self._live)):
            return
        after = list[Any](before)
        for optimizer, live in zip(self._optimizers, self._live, strict=True):  # entries are written in place
            optimizer.state = defaultdict(dict, {param: copy.copy(entry) for param, entry in live.own.items()})
        try:
            self._fetch()  # writes to all
            fetched = [one.state for one in self._optimizers]
            for index, live in enumerate(self._live):
                if before[index] is live:
                    read_exported(self._optimizers[index])
            after = [new if old is live else old for old, live, new in zip(before, self._live, fetched, strict=True)]
        finally:  # after an error nobody has seen them
            for optimizer, state in zip(self._optimizers, after, strict=True):
                optimizer.state = state

    def push(self) -> None:
        """Push to the mesh, before a step, states that user code has seen and may have changed or replaced."""
        if self._are_hidden():
            return
        self._open()
        self._load()
        self._hide()

    def end(self, *, failed: bool = False) -> bool:
        """The optimizers have their own state again. Whether it is what counts, as user code has seen it; else the mesh has it.

        Args:
            failed: a step may have ended with an error, and its donated arrays are gone.
        """
        opened = not self._are_hidden()
        try:
            if opened:
                self._open()
        except RuntimeError:
            if not failed:
                raise
            opened = False
        for optimizer, live in zip(self._optimizers, self._live, strict=True):
            if not opened:
                optimizer.state = live.own  # pyright: ignore[reportAttributeAccessIssue]
        return opened


@contextlib.contextmanager
def states_kept(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep the optimizers' states through exports in the block: exported states stand for arrays that the next step replaces."""
    kept = [one.state for one in optimizers]
    try:
        for optimizer, state in zip(optimizers, kept, strict=True):
            optimizer.state = defaultdict(dict, state.own if isinstance(state, LiveOptimizerState) else state)
        yield
    finally:
        for optimizer, state in zip(optimizers, kept, strict=True):
            optimizer.state = state
