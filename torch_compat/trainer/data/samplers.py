"""Index streams: from a user's samplers to the global batches of the mesh, and to one process's rows of them.

One *global* stream of batches is defined by the user's own sampler or batch sampler. Each process draws the same stream and
keeps its rows, so the order of samples does not depend on the number of processes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from xlatrain.mesh.data import BatchLayout

Broadcast = Callable[[Any], Any]
"""Gives every process the value that process 0 passed."""

_OWN = ("__setstate__", "state_dict", "load_state_dict")
"""What is not the wrapped sampler's: a StatefulDataLoader counts what it drew, since that sampler's count is another one."""


class _OverBatches(Sampler[list[Any]]):
    """Attributes that are not its own are those of a user's batch sampler, ``batches``."""

    batches: Iterable[list[Any]]

    def __getattr__(self, name: str) -> Any:
        if name in ("batches", *_OWN):
            raise AttributeError(name)
        return getattr(self.batches, name)


class JoinedBatches(_OverBatches):
    """``count`` consecutive batches of a user's batch sampler as one.

    A last group of fewer batches is kept, unless ``drop_last``.
    """

    def __init__(self, batches: Iterable[list[Any]], count: int, drop_last: bool) -> None:
        self.batches = batches
        self.count = count
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        stream = iter(self.batches)
        while group := list(itertools.islice(stream, self.count)):
            if len(group) < self.count and self.drop_last:
                return
            yield [index for batch in group for index in batch]

    def __len__(self) -> int:
        n = len(self.batches)  # pyright: ignore[reportArgumentType]  # a user's batch sampler without a length has no len()
        return n // self.count if self.drop_last else -(-n // self.count)


class ExpandedSampler(Sampler[Any]):
    """The global stream of which a user's ``DistributedSampler`` is one rank's part.

    ``DistributedSampler`` itself becomes its permutation, without the duplicates that pad it to a multiple of the ranks. A
    subclass with its own ``__iter__`` is run for every rank and dealt round robin, padding included. ``set_epoch`` and every
    other attribute reach the user's sampler.
    """

    def __init__(self, sampler: DistributedSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        if type(self.sampler).__iter__ is DistributedSampler.__iter__:
            return iter(_with_ranks(self.sampler, 1, 0))
        ranks = range(self.sampler.num_replicas)
        streams = [list(_with_ranks(self.sampler, None, rank)) for rank in ranks]
        return itertools.chain.from_iterable(zip(*streams, strict=True))

    def __len__(self) -> int:
        if type(self.sampler).__iter__ is DistributedSampler.__iter__:
            return len(self.sampler.dataset)  # pyright: ignore[reportArgumentType]
        return len(self.sampler) * self.sampler.num_replicas

    def __getattr__(self, name: str) -> Any:
        if name in ("sampler", *_OWN):
            raise AttributeError(name)
        return getattr(self.sampler, name)


def _with_ranks(sampler: DistributedSampler, replicas: int | None, rank: int) -> DistributedSampler:
    """The sampler as another rank has it; with ``replicas=1`` as if there were one rank only."""
    other = copy.copy(sampler)
    other.rank = rank
    if replicas is not None:
        other.num_replicas = replicas
        other.num_samples = other.total_size = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
    return other


class ProcessBatches(_OverBatches):
    """The rows that one process has of each global batch.

    A global batch with fewer rows than processes leaves some without: these load its last sample twice, as a pattern, and
    ``sizes`` says 0. (Twice, so that no leaf of dim 0 = 1 is taken for a leaf of one row.)

    Attributes:
        sizes: number of this process's rows in each batch of the current pass.
        seen_batch_indices: the indices of these rows, kept if ``record``; the name that prediction writers read.
        required: whether a loader that takes its indices from elsewhere would give wrong batches.
    """

    PATTERN_ROWS = 2

    def __init__(self, batches: Iterable[list[Any]], layout: BatchLayout, *, record: bool = False, required: bool = True) -> None:
        self.batches = batches
        self.layout = layout
        self.record = record
        self.required = required
        self.sizes: list[int] = []
        self.seen_batch_indices: list[list[Any]] = []

    def __iter__(self) -> Iterator[list[Any]]:
        self.sizes = []
        self.seen_batch_indices = []
        for batch in self.batches:
            rows = [batch[i] for span in self.layout.spans(len(batch)) for i in span]
            self.sizes.append(len(rows))
            if self.record:
                self.seen_batch_indices.append(rows)
            yield rows or [batch[-1]] * self.PATTERN_ROWS

    def __len__(self) -> int:
        return len(self.batches)  # pyright: ignore[reportArgumentType]


class ProcessItems(Sampler[Any]):
    """A sampler that gives every process its own of each ``processes`` consecutive items: the dataset gives whole batches."""

    def __init__(self, items: Iterable[Any], layout: BatchLayout) -> None:
        self.items = items
        self.layout = layout
        self.required = True
        self.sizes: list[int | None] = []

    def __iter__(self) -> Iterator[Any]:
        self.sizes = []
        stream = iter(self.items)
        while group := list(itertools.islice(stream, self.layout.processes)):
            mine = self.layout.position < len(group)
            self.sizes.append(None if mine else 0)
            yield group[self.layout.position] if mine else group[-1]

    def __len__(self) -> int:
        return -(-len(self.items) // self.layout.processes)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name in ("items", *_OWN):
            raise AttributeError(name)
        return getattr(self.items, name)


class SharedStream(Sampler[Any]):
    """A sampler whose draws are process 0's on every process.

    Torch's own samplers draw from a generator only: it is set from process 0 at the start of a pass. Any other sampler runs on
    process 0 alone, and its indices are sent batch by batch, just when they are asked for: they may depend on anything.
    """

    def __init__(self, stream: Iterable[Any], broadcast: Broadcast, *, is_source: bool) -> None:
        self.stream = stream
        self.broadcast = broadcast
        self.is_source = is_source

    def __iter__(self) -> Iterator[Any]:
        self._check_lengths()
        kind = randomness(self.stream)
        if kind == "unknown":
            return self._from_source()
        if kind == "generator":
            self._share_generator()
        return iter(self.stream)

    def __len__(self) -> int:
        return len(self.stream)  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        if name in ("stream", *_OWN):
            raise AttributeError(name)
        return getattr(self.stream, name)

    def _check_lengths(self) -> None:
        try:
            here = len(self)
        except (TypeError, NotImplementedError):
            here = None
        there = self.broadcast(here)
        if here != there:
            raise RuntimeError(
                f"the data loader has {here} batches of samples on this process and {there} on process 0; every process must be "
                "given the same dataset and sampler (each then loads its own rows of it)"
            )

    def _share_generator(self) -> None:
        generator = getattr(_innermost(self.stream), "generator", None) or torch.default_generator
        state = self.broadcast(generator.get_state().numpy() if self.is_source else None)
        if not self.is_source:
            generator.set_state(torch.from_numpy(state))

    def _from_source(self) -> Iterator[Any]:
        stream = iter(self.stream) if self.is_source else iter(())
        while True:
            item, done = self.broadcast(_next(stream) if self.is_source else None)
            if done:
                return
            yield item


def _next(stream: Iterator[Any]) -> tuple[Any, bool]:
    for item in stream:
        return item, False
    return None, True


def randomness(stream: Iterable[Any]) -> str:
    """The source of a sampler's randomness: ``"none"``, ``"generator"`` (torch's, or its own), or ``"unknown"``."""
    inner = _innermost(stream)
    if inner is None:
        return "unknown"
    if type(inner) is SequentialSampler or (type(inner) is ExpandedSampler and type(inner.sampler) is DistributedSampler):
        return "none"
    return "generator" if type(inner) in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler) else "unknown"


def _innermost(stream: Iterable[Any]) -> Any:
    """The sampler below torch's own batching; None where a batch sampler of the user's is in between."""
    if type(stream) is BatchSampler:
        return _innermost(stream.sampler)
    return None if isinstance(stream, (BatchSampler, JoinedBatches)) else stream
