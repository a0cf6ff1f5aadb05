"""``optimizer.state`` during a compiled run: it is on the mesh, and comes to the host when user code asks for it."""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_compat.step.optimizers.state import read_exported
from xlatrain.bridge.tensors.host_copies import is_shown
from xlatrain.bridge.tensors.lazy import become_lazy, fetch_from, fetch_nothing, memory_of, read_lazy, unread_lazy

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
    *("__or__", "__ror__", "__ior__", "__reversed__"),
):
    setattr(LiveOptimizerState, _name, _through(_name))


_OF_ENTRY = 2  # references to a tensor that only its entry has: the entry's and ours
_Slot = tuple[int, Any, Any]
"""The place of a tensor: the index of the optimizer, the parameter, the entry's name."""


@dataclass(frozen=True, eq=False)
class _OfToday:
    """The function that gives a tensor of a state, which user code holds, the values that the state has by now."""

    states: LiveOptimizerStates
    slot: _Slot

    def __call__(self) -> torch.Tensor:
        return self.states.value_of(self.slot)


class LiveOptimizerStates:
    """The states of a run's optimizers, while their values are on the mesh.

    A tensor of a state that user code holds through steps, alone or in a ``state_dict()`` that was not copied, stays the state's
    tensor, as in torch, whose optimizers write to it in place.

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
        self._held: dict[_Slot, weakref.ref[torch.Tensor]] = {}
        for index, live in enumerate(self._live):
            for param, entry in live.own.items():
                self._follow(index, param, entry)
        self._hide()

    def _follow(self, index: int, param: Any, entry: Any) -> None:
        """Follow the tensors of an entry from before the run that user code holds."""
        for key in list(entry) if isinstance(entry, dict) else ():
            if type(entry[key]) is torch.Tensor and sys.getrefcount(entry[key]) > _OF_ENTRY and not is_shown(entry[key], 1):
                slot = (index, param, key)
                self._held[slot] = weakref.ref(entry[key])
                become_lazy(entry[key], _OfToday(self, slot))

    def _hide(self) -> None:
        for optimizer, live in zip(self._optimizers, self._live, strict=True):
            optimizer.state = live  # pyright: ignore[reportAttributeAccessIssue]

    def _are_hidden(self) -> bool:
        return all(map(operator.is_, map(_STATE, self._optimizers), self._live))

    def _fetched(self) -> list[Any]:
        """The optimizers' states as they are on the mesh; the optimizers keep what they have."""
        before = [one.state for one in self._optimizers]
        for optimizer, live in zip(self._optimizers, self._live, strict=True):  # entries are written in place
            optimizer.state = defaultdict(dict, {param: copy.copy(entry) for param, entry in live.own.items()})
        try:
            self._fetch()  # writes to all
            return [one.state for one in self._optimizers]
        finally:
            for optimizer, state in zip(self._optimizers, before, strict=True):
                optimizer.state = state

    def _open(self, asking: _Slot | None = None) -> torch.Tensor | None:
        """Bring the states to the host of the optimizers that still have a stand-in: the others' are what user code made them.

        Args:
            asking: the place of a tensor whose values are asked for, which are returned.
        """
        hidden = [index for index, one in enumerate(self._optimizers) if one.state is self._live[index]]
        if not hidden:
            return None
        fetched, asked = self._fetched(), None
        for slot, tensor in self._still_held():
            index, param, key = slot
            new = fetched[index].get(param, {}).get(key)
            if index not in hidden or not isinstance(new, torch.Tensor):
                continue
            fetched[index][param][key] = tensor
            if slot is asking:
                asked = new
            else:
                _take(tensor, new)
        for index in hidden:  # after an error nobody has seen them
            self._optimizers[index].state = fetched[index]
        for index in hidden:
            read_exported(self._optimizers[index])
        if asked is not None:
            read_lazy(asked)
        return asked

    def value_of(self, slot: _Slot) -> torch.Tensor:
        """An ordinary tensor with the values that a held one has by now."""
        index, param, key = slot
        if self._optimizers[index].state is self._live[index]:
            value = self._open(slot)
        else:
            value = self._fetched()[index].get(param, {}).get(key)
            read_lazy(value)
        if value is not None:
            return value
        held = self._held[slot]()
        assert held is not None  # who asks has it
        with torch._C.DisableTorchFunctionSubclass():
            return held.data

    def _still_held(self) -> list[tuple[_Slot, torch.Tensor]]:
        return [(slot, tensor) for slot, ref in self._held.items() if (tensor := ref()) is not None]

    def _tensors(self) -> Iterator[tuple[_Slot, torch.Tensor]]:
        """The tensors of the states that are open."""
        for index, (optimizer, live) in enumerate(zip(self._optimizers, self._live, strict=True)):
            for param, entry in () if optimizer.state is live else optimizer.state.items():
                for key, value in entry.items() if isinstance(entry, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield (index, param, key), value

    def shared(self) -> bool:
        """Whether two places of states that are open have one tensor: torch's ``load_state_dict`` copies none."""
        seen = [memory_of(tensor)[0] for _, tensor in self._tensors() if tensor.numel()]
        return len(set(seen)) < len(seen)

    def shown(self) -> bool:
        """Whether user code holds a view, or an array, of a tensor of states that are open: it is not told what steps write."""
        read = (tensor for _, tensor in self._tensors() if unread_lazy(tensor) is None)
        return any(is_shown(tensor, 1) for tensor in read)

    def push(self) -> None:
        """Push to the mesh, before a step, states that user code has seen and may have changed or replaced."""
        if self._are_hidden():
            return
        self._open()
        for _, tensor in self._tensors():
            if isinstance(unread_lazy(tensor), _OfToday):
                read_lazy(tensor)
        self._load()
        self._held = {slot: weakref.ref(tensor) for slot, tensor in self._tensors()}
        for optimizer, live in zip(self._optimizers, self._live, strict=True):
            for param in live.own.keys() - optimizer.state.keys():  # taken out by user code, maybe with its place in a group
                del live.own[param]
        self._hide()
        for slot, tensor in self._still_held():
            become_lazy(tensor, _OfToday(self, slot))
        self._held = {slot: ref for slot, ref in self._held.items() if ref() is not None}

    def end(self, *, failed: bool = False) -> bool:
        """The optimizers have their own state again. Whether it is what counts, as user code has seen it; else the mesh has it.

        Args:
            failed: a step may have ended with an error, and its donated arrays are gone.
        """
        opened = not self._are_hidden() or bool(self._still_held())
        try:
            if opened:
                self._open()
            for _, tensor in self._still_held():
                read_lazy(tensor)
        except RuntimeError:
            if not failed:
                raise
            opened = False
            for _, tensor in self._still_held():
                if isinstance(unread_lazy(tensor), _OfToday):
                    fetch_nothing(tensor)
        self._held.clear()
        for optimizer, live in zip(self._optimizers, self._live, strict=True):
            if not opened:
                optimizer.state = live.own  # pyright: ignore[reportAttributeAccessIssue]
        return opened


def _take(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a held tensor the values, which may be on the mesh still."""
    if unread_lazy(values) is not None:
        fetch_from(tensor, values)
    else:
        tensor._fetch = lambda: values  # pyright: ignore[reportAttributeAccessIssue]
        read_lazy(tensor)


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
