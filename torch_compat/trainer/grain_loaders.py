"""Loaders of grain: their numpy batches as tensors, and of a ``MapDataset`` each process its own items.

API: https://google-grain.readthedocs.io
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils._pytree as pytree

from torch_compat.functional.batches import take_rows
from xlatrain.bridge.host import from_numpy
from xlatrain.data import BatchLayout


def prepared(loader: Any, layout: BatchLayout) -> GrainBatches | GrainItems | None:
    """What to iterate instead of a ``grain.DataLoader``, ``IterDataset`` or ``MapDataset``; None for anything else."""
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

    def __iter__(self) -> Iterator[Any]:
        return _Tensors(iter(self._loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Tensors(Iterator[Any]):
    """A grain iterator, with its state, whose batches are of tensors."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self.get_state = iterator.get_state
        self.set_state = iterator.set_state

    def __next__(self) -> Any:
        return _as_tensors(next(self._iterator))


class GrainItems:
    """A ``grain.MapDataset`` whose items are batches: of each so many consecutive ones a process takes one, the same as on one.

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
        """This process's batches after its first so many; where the last round is short, the last item without rows."""
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
        """How many batches were taken."""
        return {"taken": self._taken}

    def set_state(self, state: dict[str, int]) -> None:
        """Continue after so many."""
        self._taken = state["taken"]
        self._rest = self._items.after(self._taken)


def _as_tensors(batch: Any) -> Any:
    return pytree.tree_map_only(np.ndarray, lambda array: array if array.dtype.kind in "OUSMm" else from_numpy(array), batch)
