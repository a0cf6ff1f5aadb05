"""Passes over a loader, whose position can be saved and found again.

A loader that has a state of its own continues from it. Any other is read again from where its pass began, with the random streams
that it began with: for a map-style dataset that gives the same samples, the random draws of its workers included.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torch_compat.trainer.data import host_random
from torch_compat.trainer.data.dataloaders import TogetherIterable, iterate_alone
from torch_compat.trainer.data.grain_loaders import GrainBatches, GrainItems
from torch_compat.trainer.data.moved_streams import state_here
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn

State = dict[str, Any]


class LoaderPass(Iterator[Any]):
    """The batches of a loader; ``iter()`` begins another pass.

    Args:
        loader: prepared for the mesh. On several processes it is this process's part alone that is iterated.
        name: of the loader, for messages.
    """

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name
        self._iterator: Iterator[Any] | None = None
        self._own: _Own | None = None  # these two are looked up once a pass, and read for every batch
        self._unit = ""
        self._began: State = {}
        self._taken = 0
        self._ended = False

    def __iter__(self) -> LoaderPass:
        self._began = beginning(self.loader)
        self._taken, self._ended = 0, False
        self._read(iterate_alone(self.loader))
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            raise StopIteration
        if not self._taken and "first" not in self._began:
            self._began["first"] = host_random.streams()  # samplers draw their seed with the first batch
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        self._taken += 1
        return batch

    def __len__(self) -> int:
        return len(self.loader)

    def close(self) -> None:
        """Let the iterator go, and with it its worker processes."""
        self._iterator, self._own = None, _own_state(self.loader, None)

    def state(self) -> State:
        """The position of the pass: between two batches, before the next is drawn."""
        if self._ended:
            return {**between_passes(self.loader), "began": self._began, "taken": self._taken, "ended": True}
        # A copy: it is kept while the loader goes on.
        kept = None if self._own is None else copy.deepcopy(self._own.get())
        return {"began": self._began, "taken": self._taken, "ended": False, "own": kept, "unit": self._unit}

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Take the batches from there."""
        self._iterator = iterator
        self._own, self._unit = _own_state(self.loader, iterator), unit_of(self.loader)
        return iterator

    def resume(self, state: State) -> None:
        """Continue a pass; moves the global random streams, which the caller sets afterwards.

        Raises:
            MisconfigurationException: the loader is another kind than the one that was saved.
        """
        self._began, self._taken, self._ended = state["began"], state["taken"], state["ended"]
        if self._ended:
            set_between_passes(self.loader, state, self.name)
            self._read(iter(()))
            return
        if self._began["workers_kept"]:
            iterate_alone(self.loader)  # starts them, as the first pass did
        set_beginning(self.loader, self._began, self.name)
        first = self._began.get("first", self._began["streams"])
        if state["own"] is not None:
            self._read(_continue(self.loader, state["own"], self.name))
            host_random.set_streams(first)
            if "first" in self._began:
                _start_sampler(self.loader)
            return
        iterator = self._read(iterate_alone(self.loader))
        host_random.set_streams(first)
        if self._taken and not is_indexed(self.loader):
            rank_zero_warn(
                f"{self.name}: `{kind_of(self.loader)}` has no state to continue from, so its first {self._taken} batches are "
                "read again and passed over. That is exact only if it gives the same batches each time; otherwise give it "
                "`state_dict()` and `load_state_dict(state)` (an IterableDataset without workers, any iterable), or use "
                "torchdata's StatefulDataLoader or a grain loader."
            )
        for _ in itertools.islice(iterator, self._taken):
            pass


def beginning(loader: Any) -> State:
    """The state on which a pass depends, just before it begins."""
    generators = host_random.generator_states(loader)
    return {"streams": host_random.streams(), "generators": generators, "workers_kept": _workers_kept(loader)}


def _workers_kept(loader: Any) -> bool:
    """Whether the worker processes of the last pass serve the next one, too."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def set_beginning(loader: Any, began: State, name: str) -> None:
    """Set the random streams with which a pass began."""
    if not host_random.set_generator_states(loader, began["generators"]):
        rank_zero_warn(
            f"{name}: the loader holds other random generators than the one that was saved; they begin anew, so the order of "
            "samples may differ"
        )
    host_random.set_streams(began["streams"])


def between_passes(loader: Any) -> State:
    """The state of a loader that outlives a pass: its generators, and its dataset's or iterable's where that lives on."""
    own = None if isinstance(loader, DataLoader) and _has_state(loader) else _own_state(loader, None)
    kept = None if own is None else own.get()
    generators = host_random.generator_states(loader)
    return {"generators": generators, "own": kept, "unit": unit_of(loader), "workers_kept": _workers_kept(loader)}


def set_between_passes(loader: Any, state: State, name: str) -> None:
    """Give a loader that will begin a pass the state that it had between two."""
    streams = host_random.streams()
    if state["workers_kept"] and not _workers_kept(loader):
        iterate_alone(loader)  # starts them, as the first pass did
    set_beginning(loader, {"generators": state["generators"], "streams": streams}, name)
    own = _own_state(loader, None)
    if state["own"] is not None and own is not None:
        own.set(own.here(state["own"], loader, name, between=True))


def unit_of(loader: Any) -> str:
    """The unit that a pass counts: global ``"batch"``es, ``"item"``s (a process's batch each), or batches of its ``"stream"``."""
    if isinstance(loader, GrainItems):
        return "item"
    if not is_indexed(loader):
        return "stream"
    return "item" if loader.batch_sampler is None else "batch"


def is_indexed(loader: Any) -> bool:
    """Whether its position is a number of items: the same on every process, and read again exactly."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def kind_of(loader: Any) -> str:
    """The name by which a message calls the loader."""
    loader = loader.alone if isinstance(loader, TogetherIterable) else loader
    if isinstance(loader, DataLoader):
        return f"{type(loader).__qualname__}({type(loader.dataset).__qualname__})"
    if isinstance(loader, GrainBatches):
        return f"grain.{type(loader.alone).__qualname__}"
    return type(loader).__qualname__


def _start_sampler(loader: Any) -> None:
    """Let the sampler of a ``StatefulDataLoader`` that continues draw its seed now; it would with the next batch."""
    iterator = getattr(loader, "_iterator", None)
    if isinstance(loader, DataLoader) and loader.num_workers == 0 and hasattr(iterator, "_sampler_iter"):
        indices = iterator._sampler_iter  # pyright: ignore[reportOptionalMemberAccess]
        ahead = list(itertools.islice(indices, 1))
        iterator._sampler_iter = itertools.chain(ahead, indices)  # pyright: ignore[reportOptionalMemberAccess]


class _Own:
    """A loader's own state, under either pair of names."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        torch_names = hasattr(owner, "state_dict")
        self.get = owner.state_dict if torch_names else owner.get_state
        self.set = owner.load_state_dict if torch_names else owner.set_state

    def here(self, saved: Any, loader: Any, name: str, *, between: bool = False) -> Any:
        """The part of the saved state that belongs to this process."""
        return state_here(saved, self._owner, name=name, kind=kind_of(loader), between=between)


def _has_state(owner: Any) -> bool:
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict")) or all(
        callable(getattr(owner, name, None)) for name in ("get_state", "set_state")
    )


def _own_state(loader: Any, iterator: Iterator[Any] | None) -> _Own | None:
    """The state of the loader itself, of a dataset that lives in this process, or of the iterator (of grain)."""
    loader = loader.alone if isinstance(loader, TogetherIterable) else loader
    if isinstance(loader, DataLoader) and not _has_state(loader):
        streams_here = isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0
        return _Own(loader.dataset) if streams_here and _has_state(loader.dataset) else None
    if _has_state(loader):
        return _Own(loader)
    if iterator is not None and not isinstance(loader, DataLoader) and _has_state(iterator):
        return _Own(iterator)
    return None


def _continue(loader: Any, state: Any, name: str) -> Iterator[Any]:
    own = _own_state(loader, None)
    if own is not None:
        own.set(own.here(state, loader, name))
        return iterate_alone(loader)
    iterator = iterate_alone(loader)
    own = _own_state(loader, iterator)
    if own is None:
        raise MisconfigurationException(
            f"{name}: the checkpoint holds the state of the loader that was read, but `{kind_of(loader)}` can take none; use the "
            "loader that was used when it was saved, or resume from a checkpoint that was saved at the end of an epoch"
        )
    own.set(own.here(state, loader, name))
    return iterator
