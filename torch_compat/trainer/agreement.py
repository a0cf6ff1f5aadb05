"""Processes agree on each batch: whether there is one, and how many rows each of them brings (DESIGN 5.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch_compat.functional.batches import first_batch_size, flatten_batch
from xlatrain import distributed
from xlatrain.data import BatchLayout


class UnequalBatchesError(RuntimeError):
    """Some processes ran out of batches before others."""


class Agreement:
    """Iterates a loader in step with the other processes. On one process it only iterates.

    Args:
        layout: which process holds which rows.
    """

    def __init__(self, layout: BatchLayout) -> None:
        self._processes = layout.processes

    def batches(self, loader: Any, length: int | float) -> Iterator[tuple[Any, Sequence[int] | None]]:
        """Each batch, and how many rows each process brings (None on one process).

        Raises:
            UnequalBatchesError: the processes' loaders have different lengths.
        """
        if self._processes == 1:
            for batch in loader:
                yield batch, None
            return
        iterator = iter(loader)
        for index in range(1 << 62):
            batch = next(iterator, _END)
            sizes = distributed.all_gather_object(None if batch is _END else _rows(batch))
            if all(size is None for size in sizes):
                return
            if any(size is None for size in sizes):
                short = [process for process, size in enumerate(sizes) if size is None]
                raise UnequalBatchesError(
                    f"processes {short} have {index} batches, the others have more. Every process must bring the same number of batches: "
                    "give an IterableDataset the same number of samples on every process, or set limit_*_batches"
                )
            yield batch, sizes


_END = object()


def _rows(batch: Any) -> int:
    leaves, _ = flatten_batch(batch)
    return first_batch_size(leaves) or 1
