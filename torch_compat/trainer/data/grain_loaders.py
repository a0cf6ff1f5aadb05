"""Loaders of grain: their numpy batches as tensors, and of a ``MapDataset`` each process its own items.

API: https://google-grain.readthedocs.io
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils._pytree as pytree

from torch_compat.run.batches import take_rows
from torch_compat.trainer.data.moved_streams import NotMovable
from xlatrain.bridge.tensors.host import from_numpy
from xlatrain.mesh.data import BatchLayout


def prepared(loader: Any, layout: BatchLayout) -> GrainBatches | GrainItems | None:
    """The loader to iterate instead of a ``grain.DataLoader``, ``IterDataset`` or ``MapDataset``; None for anything else."""
    grain = sys.modules.get("grain")  # whoever made one has imported it
    if grain is None:
        return None
    if isinstance(loader, grain.MapDataset):
        return GrainItems(loader, layout.processes, layout.position)
    return GrainBatches(loader) if isinstance(loader, (grain.DataLoader, grain.IterDataset)) else None


class GrainBatches:
    """A ``grain.DataLoader`` or ``IterDataset`` of batches; every attribute is its own.

    On several processes each reads a stream of its own: shard it in grain (``grain.sharding.ShardByJaxProcess``, ``ds[p::n]``).
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def alone(self) -> Any:
        """Grain's own object."""
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        return _Tensors(iter(self._loader), self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Tensors(Iterator[Any]):
    """A grain iterator, with its state, whose batches are of tensors."""

    def __init__(self, iterator: Any, loader: Any) -> None:
        self._iterator = iterator
        self._loader = loader
        self.get_state = iterator.get_state
        self.set_state = iterator.set_state

    def __next__(self) -> Any:
        return _as_tensors(next(self._iterator))

    def reshard_state_dicts(self, states: list[Any], process_index: int, process_count: int) -> Any:
        """See :mod:`~torch_compat.trainer.data.moved_streams`: of a ``grain.DataLoader`` that reads records in turns."""
        return resharded(self._loader, states, process_count)


class GrainItems:
    """A ``grain.MapDataset`` of batches: of each group of consecutive items a process takes its own, the same as on one process.

    Args:
        dataset: of batches.
        processes, position: how many processes there are, and which is this one.
    """

    def __init__(self, dataset: Any, processes: int, position: int) -> None:
        self._dataset = dataset
        self._processes = processes
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        return _Items(self)

    def __len__(self) -> int:
        if len(self._dataset) == sys.maxsize:
            raise TypeError("a grain.MapDataset that is repeated for ever has no length")
        return -(-len(self._dataset) // self._processes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def after(self, taken: int) -> Iterator[Any]:
        """Yield this process's batches after its first ``taken``; where the last round is short, the last item without rows."""
        first, count = taken * self._processes + self._position, len(self._dataset)
        if first < count:
            yield from map(_as_tensors, self._dataset[first :: self._processes])
        if self._position >= (count % self._processes or self._processes) and taken < len(self):
            yield take_rows(_as_tensors(self._dataset[count - 1]), 0)


class _Items(Iterator[Any]):
    def __init__(self, items: GrainItems) -> None:
        self._items = items
        self._taken = 0
        self._rest = items.after(0)

    def __next__(self) -> Any:
        batch = next(self._rest)
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """The number of batches that were taken."""
        return {"taken": self._taken}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue after so many."""
        self._taken = state["taken"]
        self._rest = self._items.after(self._taken)


def _as_tensors(batch: Any) -> Any:
    return pytree.tree_map_only(np.ndarray, lambda array: array if array.dtype.kind in "OUSMm" else from_numpy(array), batch)


def resharded(loader: Any, states: list[Any], process_count: int) -> Any:
    """The state with which ``process_count`` processes continue what a ``grain.DataLoader`` has read on as many as ``states``.

    A sampler without shards of its own gives one order of records, of which the loader's shards take one each in turn; a state
    is the index of its last record. That of the last shard is then where all of them are.

    Raises:
        NotMovable: the order depends on the number of shards, or of workers, or the batch of all processes had another size.
    """
    grain = sys.modules["grain"]
    if not isinstance(loader, grain.DataLoader):
        raise NotMovable("a grain.IterDataset does not say how its stream is divided among processes")
    transforms = grain.transforms
    batches = [op for op in loader._operations if isinstance(op, transforms.Batch)]
    others = [op for op in loader._operations if not isinstance(op, transforms.Batch | transforms.Map | transforms.RandomMap)]
    if len(batches) != 1 or others:
        raise NotMovable("only records that are mapped, and made into batches once, are the same on another number of processes")
    said = [json.loads(state) for state in states]
    if said[0]["worker_count"]:
        raise NotMovable("its worker processes make batches of their own (worker_count=0 makes the same on any number)")
    if any(one["sampler"] != repr(loader._sampler) for one in said):
        raise NotMovable(
            "its sampler is another one, or orders each shard by itself: give shard_options to the grain.DataLoader, and none to "
            "the sampler"
        )
    last = [one["last_seen_indices"]["0"] for one in said]
    read, batch = last[-1] + 1, batches[0].batch_size * process_count
    if last != list(range(read - len(last), read)):
        raise NotMovable(f"its processes have not read the same number of records (they were at {last})")
    if read % batch:
        raise NotMovable(f"{read} records were read, which is no number of batches of {process_count} × {batches[0].batch_size}")
    return states[-1]
