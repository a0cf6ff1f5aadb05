"""The batches of a ``DataLoader`` without worker processes, with less host time than torch's own iterator takes.

They are the same batches, in the same order, from the same random streams: torch's iterator is made as ever and its sampler is
asked. A ``TensorDataset`` (or a ``Subset`` of one, as ``random_split`` makes) gives a whole batch by one ``index_select`` a
tensor, where torch takes row by row and stacks them. Of other datasets only torch's mark for profilers is left out, while no
profiler records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch._C._autograd import _profiler_enabled
from torch.utils.data import Subset, TensorDataset, dataloader, default_collate
from torch.utils.data._utils import collate, fetch

_Iterator = dataloader._SingleProcessDataLoaderIter
_Fetcher = fetch._MapDatasetFetcher


def _methods() -> tuple[Any, ...]:
    """The methods that are not called here although torch would call them."""
    return (
        _Iterator.__next__,
        _Fetcher.fetch,
        TensorDataset.__getitem__,
        getattr(TensorDataset, "__getitems__", None),
        Subset.__getitems__,
        collate.default_collate_fn_map.get(torch.Tensor),
        collate.default_collate_fn_map.get(tuple),
    )


_TORCHS = _methods()


def in_less_time(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches as those of a DataLoader's iterator.

    Returns ``batches`` itself if it is another iterator, has workers or is over an ``IterableDataset``, or if one of torch's
    methods that are passed over here has been replaced.
    """
    if type(batches) is not _Iterator or type(batches._dataset_fetcher) is not _Fetcher or _methods() != _TORCHS:
        return batches
    return _SingleProcessBatches(batches)


class _SingleProcessBatches(Iterator[Any]):
    def __init__(self, batches: _Iterator) -> None:
        self._batches = batches
        self._rows = _Rows.of(batches)

    def __next__(self) -> Any:
        batches = self._batches
        if _profiler_enabled():
            return next(batches)
        if self._rows is None:
            batch = batches._next_data()
        else:
            indices = batches._next_index()
            batch = self._rows.take(indices)
            if batch is None:
                self._rows = None
                batch = batches._dataset_fetcher.fetch(indices)
        batches._num_yielded += 1
        return batch


class _Rows:
    """The rows of a ``TensorDataset``, or of a ``Subset`` of one; what these hold may be assigned anew between batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._tensors: Any = None

    @classmethod
    def of(cls, batches: _Iterator) -> _Rows | None:
        """The rows that the iterator loads, where it stacks them as they are."""
        if not batches._auto_collation or batches._collate_fn is not default_collate or batches._pin_memory:
            return None
        return cls(batches._dataset)

    def take(self, indices: Any) -> list[torch.Tensor] | None:
        """The batch of these rows; None where torch has to make it, or to say why it cannot."""
        if type(indices) is not list:
            return None
        dataset = self._dataset
        try:
            while type(dataset) is Subset and "__getitems__" not in dataset.__dict__:
                indices = [dataset.indices[index] for index in indices]
                dataset = dataset.dataset
            if type(dataset) is not TensorDataset or "__getitems__" in dataset.__dict__:
                return None
            if dataset.tensors is not self._tensors:
                if not all(map(_is_plain, dataset.tensors)):
                    return None
                self._tensors = dataset.tensors
            rows = torch.from_numpy(np.array(indices))
            return [tensor.index_select(0, rows) for tensor in dataset.tensors]
        except (IndexError, RuntimeError, TypeError, ValueError):  # negative or too large, pairs, no numbers at all
            return None


def _is_plain(tensor: Any) -> bool:
    """Whether rows that are selected are those that would be stacked, strides included."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.ndim > 0
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )
