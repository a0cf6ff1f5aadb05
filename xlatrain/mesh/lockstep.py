"""Lockstep of processes that walk through their data together: the same number of batches, of shapes that fit together.

A process that ran a step more than the others, or a step of another shape, would wait in its collectives for ever. So they tell
each other, between hosts and not through the devices, before a step is started.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import numpy as np

from xlatrain.cluster.distributed import Channel, world
from xlatrain.cluster.watch import progress
from xlatrain.mesh.batch_layout import BatchLayout

T = TypeVar("T")
Names = Callable[[], Sequence[str]]

_ids = itertools.count()
_END = object()


class DataMismatchError(RuntimeError):
    """Processes brought data that does not fit together: another number of batches, or other shapes."""


def lockstep(batches: Iterable[T], what: str = "the data") -> Iterator[T]:
    """``batches``, as long as every process has one. With one process simply ``iter(batches)``.

    A batch is drawn one ahead, and the processes tell each other whether they have it while the step before is run. An error in
    drawing it is raised after that step.

    Args:
        batches: this process's batches.
        what: what they are, for the error.

    Raises:
        DataMismatchError: some processes have another batch while others have none.
    """
    if world().process_count == 1:
        return iter(batches)
    return _walk(iter(batches), Channel(f"lockstep/{next(_ids)}"), what)


def _walk(batches: Iterator[T], channel: Channel, what: str) -> Iterator[T]:
    with _Background(f"xlatrain-{channel.name}") as background:
        ahead: Any = _draw(batches, what)
        told = background.submit(lambda here=ahead is not _END: channel.all_gather(here))
        for n in itertools.count():
            with progress.waiting_at(f"batch {n + 1} of {what}"):
                have = told.result()
            if not any(have):
                return
            if not all(have):
                ended = [process for process, has in enumerate(have) if not has]
                raise DataMismatchError(
                    f"{what} ended after {n} batches on processes {ended}, but the other processes have more; every process must "
                    "bring the same number of batches: make the shards equal, drop the rest, or limit the number of batches "
                    "(Trainer(limit_train_batches=…), itertools.islice)"
                )
            batch, failed = ahead, None
            try:
                ahead = _draw_ahead(batches, what)
            except Exception as error:  # the batch in hand is good
                failed = error
            else:
                told = background.submit(lambda here=ahead is not _END: channel.all_gather(here))
            yield batch
            if failed is not None:
                raise failed


def _draw(batches: Iterator[Any], what: str) -> Any:
    """The next of this process's own batches; the watch is told before and after, to know whose loader hangs."""
    phase = progress.phase
    progress.mark(f"waiting for its {what}")
    try:
        return next(batches, _END)
    finally:
        progress.mark(phase)


_drawing_ahead = False


def drawing_ahead() -> bool:
    """Whether the main thread draws a batch while another is in hand: an exception is raised after that batch was used."""
    return _drawing_ahead


def _draw_ahead(batches: Iterator[Any], what: str) -> Any:
    global _drawing_ahead
    _drawing_ahead = True
    try:
        return _draw(batches, what)
    finally:
        _drawing_ahead = False


class _Background:
    """A daemon thread that runs calls in order. (An executor's threads would be waited for at an abnormal exit.)"""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def __enter__(self) -> _Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            call, future = entry
            try:
                future.set_result(call())
            except BaseException as error:  # in a thread: it is raised where the result is asked for
                future.set_exception(error)


class Leaf(NamedTuple):
    """A leaf of a batch, as one process has it.

    Attributes:
        shape, dtype: its own, before padding.
        split: whether its dim 0 is the batch size.
        content: a checksum, of leaves that must be equal on several processes; else 0.
    """

    shape: tuple[int, ...]
    dtype: str
    split: bool
    content: int


class BatchAgreement:
    """The agreement between processes about each other's rows, and that their leaves fit together."""

    def __init__(self, layout: BatchLayout) -> None:
        here = world()
        if layout.processes != here.process_count:
            raise ValueError(
                f"the mesh has devices of {layout.processes} of the {here.process_count} processes; a batch can be put together "
                "from all processes, or from one: build the mesh over all devices"
            )
        self._channel = Channel(f"batches/{next(_ids)}")
        self._shards_of = layout.shards_of
        self._has_twin = layout.shards_of.count(layout.local) > 1

    def agree(
        self,
        hosts: list[np.ndarray],
        size: int,
        split: tuple[bool, ...],
        *,
        fixed: Sequence[Any] | None,
        names: Names | None,
    ) -> tuple[tuple[int, ...], tuple[bool, ...], list[np.ndarray]]:
        """Every process's rows, which leaves are split, and the leaves (those without rows in the shape that the others have).

        A leaf whose dim 0 happens to be the batch size on some processes only, and whose shape is the same on all, is not split.

        Args:
            fixed: leaves that are not None here are split, or not, as they are.

        Raises:
            DataMismatchError: names the leaf, and what two processes brought.
        """
        mine = (size, tuple([self._describe(host, is_split) for host, is_split in zip(hosts, split, strict=True)]))
        said: list[tuple[int, tuple[Leaf, ...]]] = self._channel.all_gather(mine)
        sizes = tuple([rows for rows, _ in said])
        if all(described == mine for described in said) and size:
            return sizes, split, hosts
        _check_counts([len(leaves) for _, leaves in said])
        agreed, shaped = [], []
        for i, host in enumerate(hosts):
            name = functools.partial(_name, i, names)
            leaves = [described[i] for _, described in said]
            is_split = all(leaf.split for leaf in leaves)
            if is_split != split[i] and fixed is not None and fixed[i] is not None:
                raise DataMismatchError(f"{name()} is split by rows on some processes only; give all the same batch_spec")
            shape = _agreed_shape(leaves, sizes, is_split, name)
            self._check_content(leaves, is_split, name)
            shaped.append(np.zeros((0, *shape), host.dtype) if is_split and not size else host)
            agreed.append(is_split)
        return sizes, tuple(agreed), shaped

    def _describe(self, host: np.ndarray, split: bool) -> Leaf:
        """The description of a leaf that processes compare; with a checksum where its values must be equal."""
        content = 0 if split and not self._has_twin else zlib.crc32(host.tobytes())
        return Leaf(host.shape, host.dtype.name, split, content)

    def _check_content(self, leaves: Sequence[Leaf], is_split: bool, name: Callable[[], str]) -> None:
        """Arrays that lie on several processes must be the same there: XLA takes that for granted."""
        first: dict[tuple[int, ...], int] = {}
        for process, leaf in enumerate(leaves):
            if leaf.split and not is_split:
                continue  # has no checksum
            other = first.setdefault(self._shards_of[process] if is_split else (), process)
            if leaf.content == leaves[other].content:
                continue
            if is_split:
                raise DataMismatchError(
                    f"{name()} has other values on process {other} than on process {process}, but these hold the same part of "
                    "the batch (their devices differ along a model axis only); give both the same data"
                )
            raise DataMismatchError(
                f"{name()} of shape {list(leaf.shape)} is not split by rows, so it is one array for all processes, but it has "
                f"other values on process {other} than on process {process}; make it the same, or give it a row for each sample"
            )


def _check_counts(counts: Sequence[int]) -> None:
    for process, count in enumerate(counts):
        if count != counts[0]:
            raise DataMismatchError(
                f"a batch has {counts[0]} tensors on process 0 and {count} on process {process}; every process must bring "
                "batches of the same structure"
            )


def _agreed_shape(leaves: Sequence[Leaf], sizes: Sequence[int], is_split: bool, name: Callable[[], str]) -> tuple[int, ...]:
    """The shape that the leaf has on all processes: of a row, if it is split."""
    with_rows = [process for process, size in enumerate(sizes) if size or not is_split] or [0]  # others brought only a pattern
    first = with_rows[0]
    start = 1 if is_split else 0
    for process in with_rows:
        if (leaves[process].shape[start:], leaves[process].dtype) != (leaves[first].shape[start:], leaves[first].dtype):
            found = [f"{leaves[p].dtype}{list(leaves[p].shape)} on process {p} (batch size {sizes[p]})" for p in (first, process)]
            raise DataMismatchError(
                f"{name()} is {' and '.join(found)}: these cannot be one array. Make the shapes equal, e.g. pad to a fixed "
                "length in collate_fn; a tensor that is not split by rows must be the same everywhere"
            )
    return leaves[first].shape[start:]


def _name(i: int, names: Names | None) -> str:
    return f"batch leaf {i}" if names is None else names()[i]
