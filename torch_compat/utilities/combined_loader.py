"""The combination of several iterables into one (``lightning.pytorch.utilities.CombinedLoader``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Self, get_args

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, Sampler

from torch_compat.utilities.data import sized_len
from torch_compat.utilities.single_process import in_less_time

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
_PRIMITIVES = (bool, int, float, complex, str, bytes)
Limits = list[int | float] | None


class _ModeIterator(Iterator[tuple[Any, int, int]]):
    """Yields ``(flat batches, batch_idx, dataloader_idx)``; see :class:`CombinedLoader` for the modes."""

    def __init__(self, iterables: list[Iterable[Any]], limits: Limits) -> None:
        if limits is not None and len(limits) != len(iterables):
            raise ValueError(f"Mismatch in number of limits ({len(limits)}) and number of iterables ({len(iterables)})")
        self.iterables = iterables
        self.limits = limits
        self.iterators: list[Iterator[Any]] = []
        self._idx = 0

    def __iter__(self) -> Self:
        self.iterators = [in_less_time(iter(iterable)) for iterable in self.iterables]
        self._idx = 0
        return self

    def __next__(self) -> tuple[Any, int, int]:
        index = self._idx
        batch = self._next_batch()
        self._idx += 1
        return batch, index, 0

    def __len__(self) -> int:
        """The number of batches; ``TypeError`` if an iterable that decides it has no length."""
        lengths = [_length(iterable) for iterable in self.iterables]
        if self.limits is not None:
            lengths = [min(length, limit) for length, limit in zip(lengths, self.limits, strict=True)]
        return _integer(self._length(lengths))

    def reset(self) -> None:
        self.iterators = []
        self._idx = 0

    def _state(self) -> dict[str, Any]:
        """The position of the iteration, beside the iterators."""
        return {"index": self._idx}

    def _resume(self, state: dict[str, Any]) -> None:
        """Continue there, with the iterables as their own iterators."""
        self.iterators = [one for one in self.iterables if isinstance(one, Iterator)]
        self._idx = state["index"]

    def _next_batch(self) -> list[Any]:
        raise NotImplementedError

    def _length(self, lengths: list[float]) -> float:
        raise NotImplementedError


class _MinSize(_ModeIterator):
    """Stops with the shortest iterable."""

    def _next_batch(self) -> list[Any]:
        if not self.iterators:
            raise StopIteration
        return [next(iterator) for iterator in self.iterators]

    def _length(self, lengths: list[float]) -> float:
        return min(lengths, default=0)


class _MaxSize(_ModeIterator):
    """Stops with the longest iterable; exhausted ones give None."""

    def __iter__(self) -> Self:
        super().__iter__()
        self._exhausted = [False] * len(self.iterators)
        return self

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "exhausted": list(self._exhausted)}

    def _resume(self, state: dict[str, Any]) -> None:
        super()._resume(state)
        self._exhausted = list(state["exhausted"])

    def _next_batch(self) -> list[Any]:
        batches: list[Any] = [None] * len(self.iterators)
        for index, iterator in enumerate(self.iterators):
            if not self._exhausted[index]:
                try:
                    batches[index] = next(iterator)
                except StopIteration:
                    self._exhausted[index] = True
        if all(self._exhausted):
            raise StopIteration
        return batches

    def _length(self, lengths: list[float]) -> float:
        return max(lengths, default=0)


class _MaxSizeCycle(_MaxSize):
    """Stops with the longest iterable; shorter ones start again."""

    def _next_batch(self) -> list[Any]:
        if not self.iterators:
            raise StopIteration
        return [self._next_of(index) for index in range(len(self.iterators))]

    def _next_of(self, index: int) -> Any:
        try:
            return next(self.iterators[index])
        except StopIteration:
            self._exhausted[index] = True
            if all(self._exhausted):
                raise
            self.iterators[index] = in_less_time(iter(self.iterables[index]))
            return next(self.iterators[index])


class _Sequential(_ModeIterator):
    """The iterables one after the other, each up to its limit; an iterator is made when its turn comes, limit 0 or not."""

    def __iter__(self) -> Self:
        self._position = 0
        self._start_current()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        while self._position < len(self.iterables):
            if self._idx < self._limit():
                with contextlib.suppress(StopIteration):
                    batch = next(self.iterators[0])
                    self._idx += 1
                    return batch, self._idx - 1, self._position
            self._position += 1
            self._start_current()
        raise StopIteration

    def _length(self, lengths: list[float]) -> float:
        return sum(lengths)

    def _limit(self) -> float:
        return float("inf") if self.limits is None else self.limits[self._position]

    def _start_current(self) -> None:
        """Drops the finished iterator (and with it its worker processes) and starts the next one."""
        self._idx = 0
        self.iterators = []
        if self._position < len(self.iterables):
            self.iterators = [in_less_time(iter(self.iterables[self._position]))]


_MODES: dict[str, Callable[[list[Iterable[Any]], Limits], _ModeIterator]] = {
    "min_size": _MinSize,
    "max_size_cycle": _MaxSizeCycle,
    "max_size": _MaxSize,
    "sequential": _Sequential,
}


class CombinedLoader(Iterable[Any]):
    """Iterates over several iterables together.

    ::

        both = CombinedLoader({"a": range(2), "b": range(4)}, mode="max_size_cycle")
        for batch, batch_idx, dataloader_idx in both:
            print(batch["a"], batch["b"])

    Each step gives ``(batch, batch_idx, dataloader_idx)``. In all modes but ``"sequential"`` ``batch`` has the structure of
    ``iterables`` with a batch in the place of each iterable, and ``dataloader_idx`` is 0.

    Args:
        iterables: one iterable, or any nesting of lists, tuples and dicts of them. A list of plain numbers or strings is itself
            an iterable.
        mode: ``"min_size"`` stops with the shortest iterable; ``"max_size_cycle"`` with the longest, starting the others again;
            ``"max_size"`` with the longest, None in the place of exhausted ones; ``"sequential"`` takes one after the other and
            says which by ``dataloader_idx``.

    Raises:
        ValueError: another mode.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in _MODES:
            raise ValueError(f"Unsupported mode {mode!r}, please select one of: {list(get_args(Mode))}.")
        self._iterables = iterables
        self._flattened, self._spec = tree_flatten(iterables, is_leaf=_is_iterable_of_primitives)
        self._is_one = self._spec.is_leaf()
        self._mode = mode
        self._iterator: _ModeIterator | None = None
        self._limits: Limits = None

    @property
    def iterables(self) -> Any:
        """The iterables in their structure."""
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        """The iterables as a flat list; may be set to a list of the same length."""
        return self._flattened

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        if len(flattened) != len(self._flattened):
            raise ValueError(f"Mismatch in flattened length ({len(flattened)}) and existing length ({len(self._flattened)})")
        self._iterables = tree_unflatten(flattened, self._spec)
        self._flattened = flattened

    @property
    def sampler(self) -> Any:
        """The samplers of the loaders, in the structure of ``iterables`` (None where there is none)."""
        return self._attribute("sampler", Sampler)

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the loaders, in the structure of ``iterables`` (None where there is none)."""
        return self._attribute("batch_sampler", BatchSampler)

    def _attribute(self, name: str, kind: type) -> Any:
        found = [getattr(loader, name, None) for loader in self._flattened]
        return tree_unflatten([value if isinstance(value, kind) else None for value in found], self._spec)

    @property
    def limits(self) -> Limits:
        """The most batches to take of each iterable, or None. It counts for ``len()``; only ``"sequential"`` stops at it."""
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        if isinstance(limits, (int, float)):
            limits = [limits] * len(self._flattened)
        elif isinstance(limits, list) and len(limits) != len(self._flattened):
            raise ValueError(f"Mismatch in number of limits ({len(limits)}) and number of iterables ({len(self._flattened)})")
        self._limits = limits

    def __iter__(self) -> Self:
        self._iterator = iter(_MODES[self._mode](self._flattened, self._limits))
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._iterator is None:
            raise RuntimeError("Please call `iter(combined_loader)` first.")
        batch, batch_idx, dataloader_idx = next(self._iterator)
        if self._mode != "sequential":
            batch = self._in_structure(batch)
        return batch, batch_idx, dataloader_idx

    def __len__(self) -> int:
        """The number of batches, limits included.

        Raises:
            RuntimeError: before ``iter()``.
            TypeError: an iterable that decides the number has no length.
        """
        if self._iterator is None:
            raise RuntimeError("Please call `iter(combined_loader)` first.")
        return len(self._iterator)

    def _batches(self) -> float:
        """The number of batches, limits included; infinite where it is not known."""
        return _length(_MODES[self._mode](self._flattened, self._limits))

    def _over(self, iterables: list[Any]) -> _ModeIterator:
        """An iteration over other iterables in the loaders' places, which is from now on the one that ``len()`` asks."""
        self._iterator = _MODES[self._mode](iterables, self._limits)
        return self._iterator

    def _in_structure(self, batches: list[Any]) -> Any:
        """A flat list of batches in the structure of ``iterables``."""
        return batches[0] if self._is_one else tree_unflatten(batches, self._spec)

    def reset(self) -> None:
        """Forgets the iteration and stops the loaders' worker processes."""
        if self._iterator is not None:
            self._iterator.reset()
            self._iterator = None
        for loader in self._flattened:
            _stop_workers(loader)

    def _dataset_length(self) -> int:
        """The number of samples in one pass, over all datasets that know theirs."""
        lengths = [sized_len(getattr(loader, "dataset", None)) for loader in self._flattened]
        known = [length for length in lengths if length is not None]
        if not known:
            raise NotImplementedError("All datasets are iterable-style datasets.")
        return min(known) if self._mode == "min_size" else sum(known) if self._mode == "sequential" else max(known)

    def _state_dicts(self) -> list[dict[str, Any]]:
        """States of the loaders that have one, such as torchdata's ``StatefulDataLoader``."""
        return [loader.state_dict() for loader in self._stateful()]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Takes back :meth:`_state_dicts`; an empty list leaves the loaders as they are."""
        if not states:
            return
        loaders = self._stateful()
        if len(loaders) != len(states):
            raise RuntimeError(
                f"The CombinedLoader has {len(loaders)} stateful loaders, but found {len(states)} states in the checkpoint:"
                " it was saved with other loaders, and no state can be matched to a loader."
            )
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)

    def _stateful(self) -> list[Any]:
        return [loader for loader in self._flattened if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")]


def _is_iterable_of_primitives(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and bool(node) and all(isinstance(item, _PRIMITIVES) for item in node)


def _length(iterable: Iterable[Any]) -> float:
    length = sized_len(iterable)
    return float("inf") if length is None else length


def _integer(length: float) -> int:
    if length == float("inf"):
        raise TypeError("This CombinedLoader has no length: an iterable that decides it has none. Set `limits`, or iterate it.")
    return int(length)


def _stop_workers(loader: Any) -> None:
    # A DataLoader keeps its iterator only with persistent workers.
    iterator = getattr(loader, "_iterator", None)
    if isinstance(loader, DataLoader) and iterator is not None:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        loader._iterator = None
