"""Samplers for predictions of processes, and parts of DDP's wrapper. API: ``lightning.pytorch.overrides.distributed``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from torch_compat.utilities.distributed import _DatasetSamplerWrapper


class UnrepeatedDistributedSampler(DistributedSampler):
    """A ``DistributedSampler`` that repeats no sample so that all ranks have as many: for predictions.

    The Trainer needs none: ``predict`` computes each sample once, on any number of devices.

    Raises:
        TypeError: a dataset without a length.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.dataset, Sized):
            raise TypeError("The given dataset must implement the `__len__` method, by which processes share its samples")
        self.num_samples = len(range(self.rank, len(self.dataset), self.num_replicas))
        self.total_size = len(self.dataset)
        assert self.num_samples >= 1 or self.total_size == 0

    def __iter__(self) -> Iterator[Any]:
        size = len(self.dataset)  # pyright: ignore[reportArgumentType]
        order = list(range(size))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.epoch)
            order = torch.randperm(size, generator=generator).tolist()
        return iter(order[self.rank : self.total_size : self.num_replicas])


class UnrepeatedDistributedSamplerWrapper(UnrepeatedDistributedSampler):
    """:class:`UnrepeatedDistributedSampler` over what another sampler gives."""

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_DatasetSamplerWrapper(sampler), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self.dataset.reset()  # pyright: ignore[reportAttributeAccessIssue]
        return (self.dataset[index] for index in super().__iter__())


class _IndexBatchSamplerWrapper:
    """A batch sampler that keeps the batches that it gave in ``seen_batch_indices``."""

    def __init__(self, batch_sampler: Any) -> None:
        self.seen_batch_indices: list[list[int]] = []
        self.__dict__.update({name: value for name, value in vars(batch_sampler).items() if name != "seen_batch_indices"})
        self._batch_sampler = batch_sampler
        self._iterator: Iterator[list[int]] | None = None

    def __iter__(self) -> Self:
        self.seen_batch_indices = []
        self._iterator = iter(self._batch_sampler)
        return self

    def __next__(self) -> list[int]:
        assert self._iterator is not None, "next() of a batch sampler before iter()"
        batch = next(self._iterator)
        self.seen_batch_indices.append(batch)
        return batch

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": None}  # a generator cannot be pickled


def _find_tensors(obj: Any) -> list[Tensor] | itertools.chain[Any]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(obj, Tensor):
        return [obj]
    if isinstance(obj, list | tuple):
        return itertools.chain(*map(_find_tensors, obj))
    if isinstance(obj, dict):
        return itertools.chain(*map(_find_tensors, obj.values()))
    return []
