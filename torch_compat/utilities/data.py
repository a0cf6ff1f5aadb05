"""Data helpers (``lightning.pytorch.utilities.data``, ``lightning.fabric.utilities.data``)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset

from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import WarningCache, rank_zero_warn

# Asked for at every step: each text is said once.
_warnings = WarningCache()


class AttributeDict(dict[Any, Any]):
    """A dict whose string keys are attributes too.

    ``d.key`` reads ``d["key"]`` and raises ``AttributeError`` if there is none; ``d.key = value`` and ``del d.key`` write
    and delete the entry. (API: ``lightning.fabric.utilities.data.AttributeDict``.)
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{key}'") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __delattr__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        del self[key]

    def __repr__(self) -> str:
        if not self:
            return ""
        width = max(len(str(key)) for key in self) + 3
        labels = {key: f'"{key}":' for key in sorted(self, key=str)}
        return "\n".join(f"{label:<{width}} {self[key]}" for key, label in labels.items())


def sized_len(obj: object) -> int | None:
    """``len(obj)``, or None where the object cannot tell it."""
    if not isinstance(obj, Sized):
        return None
    try:
        return len(obj)
    except (TypeError, NotImplementedError):
        return None


def has_iterable_dataset(dataloader: object) -> bool:
    """Whether the loader reads a ``torch.utils.data.IterableDataset``."""
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def has_len(dataloader: Iterable[Any]) -> bool:
    """Whether the loader has a usable length: warns on zero, and on an iterable dataset that defines ``__len__``."""
    length = sized_len(dataloader)
    if length == 0:
        rank_zero_warn(f"`{type(dataloader).__name__}` returned 0 length. Please make sure this was your intention.")
    if length is not None and has_iterable_dataset(dataloader):
        rank_zero_warn(
            "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading (when num_workers > 1),"
            " `__len__` could be inaccurate if each worker is not configured independently to avoid having duplicate data."
        )
    return length is not None


def suggested_max_num_workers(local_world_size: int) -> int:
    """DataLoader workers for each of ``local_world_size`` processes on this host: at least 1, leaving one core to the process."""
    if local_world_size < 1:
        raise ValueError(f"`local_world_size` should be >= 1, got {local_world_size}.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)


def extract_batch_size(batch: Any) -> int:
    """The size of dim 0 of the tensors in ``batch`` (1 for a 0-d tensor); other leaves do not count.

    Warns if tensors disagree (the first one counts); ``MisconfigurationException`` if there is nothing with a size.
    """
    sizes = _batch_sizes(batch)
    first = next(sizes, None)
    if first is None:
        raise MisconfigurationException(
            "We could not infer the batch_size from the batch. Either simplify its structure or provide the batch_size as"
            " `self.log(..., batch_size=batch_size)`."
        )
    if any(size != first for size in sizes):
        _warnings.warn(
            "Trying to infer the `batch_size` from an ambiguous collection. The batch size we found is"
            f" {first}. To avoid any miscalculations, use `self.log(..., batch_size=batch_size)`."
        )
    return first


def _batch_sizes(data: Any) -> Iterator[int]:
    if isinstance(data, torch.Tensor):
        yield data.size(0) if data.ndim else 1
    elif isinstance(data, Iterable) and not isinstance(data, str):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from _batch_sizes(value)
    elif is_dataclass(data):
        for field in fields(data):
            yield from _batch_sizes(getattr(data, field.name))
