"""Data helpers (``lightning.pytorch.utilities.data``, ``lightning.fabric.utilities.data``)."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import WarningCache, rank_zero_warn
from torch_compat.utilities.seed import pl_worker_init_function

ITERABLE_WITH_LENGTH = (
    "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading (when num_workers > 1),"
    " that length holds only if each worker gives its own part of the data (`torch.utils.data.get_worker_info()`)."
)

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
        rank_zero_warn(f"`{type(dataloader).__name__}` returned 0 length: there is nothing to run on.")
    if length is not None and has_iterable_dataset(dataloader):
        rank_zero_warn(ITERABLE_WITH_LENGTH)
    return length is not None


def has_len_all_ranks(
    dataloader: object, strategy: Any, allow_zero_length_dataloader_with_multiple_devices: bool = False
) -> bool:
    """:func:`has_len`, of a loader that every process of ``strategy`` has; warns if it is empty everywhere.

    Raises:
        RuntimeError: it is empty on some processes only, and that is not allowed.
    """
    local = sized_len(dataloader)
    if local is None:
        return False
    total = strategy.reduce(torch.tensor(local, device=strategy.root_device), reduce_op="sum")
    kind = type(dataloader).__name__
    if total == 0:
        rank_zero_warn(f"Total length of `{kind}` across ranks is zero: there is nothing to run on.")
    if total > 0 and local == 0:
        if not allow_zero_length_dataloader_with_multiple_devices:
            raise RuntimeError(f"`{kind}` within local rank has zero length, but others have batches: give each at least one.")
        rank_zero_warn(
            f"Total length of `{kind}` across ranks is not zero, but that of this process is: it has fewer batches than the "
            "others."
        )
    if has_iterable_dataset(dataloader):
        rank_zero_warn(ITERABLE_WITH_LENGTH)
    return True


def _update_dataloader(dataloader: DataLoader[Any], sampler: Any, mode: Any = None) -> DataLoader[Any]:
    """A copy of ``dataloader`` that takes its indices from ``sampler``, with every other attribute; nothing is constructed again.

    Args:
        mode: ``RunningStage.PREDICTING`` keeps the last incomplete batch.

    Raises:
        TypeError: its batch sampler has no ``sampler`` that could be replaced.
    """
    batches = dataloader.batch_sampler
    changed: dict[str, Any] = {"sampler": sampler, "_iterator": None}
    if batches is not None:
        if not hasattr(batches, "sampler"):
            raise TypeError(
                f"The batch sampler `{type(batches).__qualname__}` of the `{type(dataloader).__name__}` has no `sampler` to"
                " replace; give the DataLoader a `batch_size` instead"
            )
        drop_last = getattr(batches, "drop_last", False) and str(getattr(mode, "value", mode)) != "predict"
        changed["batch_sampler"] = _changed_copy(batches, sampler=sampler, drop_last=drop_last)
    return _changed_copy(dataloader, **changed)


def _changed_copy(value: Any, **attributes: Any) -> Any:
    copied = copy.copy(value)
    vars(copied).update(attributes)  # past `DataLoader.__setattr__`, which refuses other samplers
    return copied


def _is_dataloader_shuffled(dataloader: object) -> bool:
    """Whether the loader's order is random, as far as its sampler tells."""
    if not hasattr(dataloader, "sampler"):
        return False
    batches: Any = getattr(dataloader, "batch_sampler", None)
    sampler = batches.sampler if hasattr(batches, "sampler") else dataloader.sampler  # pyright: ignore[reportAttributeAccessIssue]
    return not isinstance(sampler, SequentialSampler) and isinstance(sampler, RandomSampler)


def _auto_add_worker_init_fn(dataloader: Any, rank: int) -> None:
    """Have the loader's workers seeded by ``pl_worker_init_function``, unless it has a function of its own."""
    if not hasattr(dataloader, "worker_init_fn"):
        return
    if int(os.environ.get("PL_SEED_WORKERS", "0")) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=rank)


def _set_sampler_epoch(dataloader: object, epoch: int) -> None:
    """``set_epoch`` of the loader's sampler and of the one in its batch sampler, where they have it; each once."""
    samplers: list[Any] = [
        getattr(dataloader, "sampler", None),
        getattr(getattr(dataloader, "batch_sampler", None), "sampler", None),
    ]
    for sampler in {id(one): one for one in samplers if callable(getattr(one, "set_epoch", None))}.values():
        sampler.set_epoch(epoch)


def _num_cpus_available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def suggested_max_num_workers(local_world_size: int) -> int:
    """DataLoader workers for each of ``local_world_size`` processes on this host: at least 1, leaving one core to the process."""
    if local_world_size < 1:
        raise ValueError(f"`local_world_size` should be >= 1, got {local_world_size}.")
    return max(1, _num_cpus_available() // local_world_size - 1)


def extract_batch_size(batch: Any) -> int:
    """The size of dim 0 of the tensors in ``batch`` (1 for a 0-d tensor); other leaves do not count.

    Warns if tensors disagree (the first one counts); ``MisconfigurationException`` if there is nothing with a size.
    """
    sizes = _batch_sizes(batch)
    first = next(sizes, None)
    if first is None:
        raise MisconfigurationException(
            "We could not infer the batch_size from the batch: there is no tensor in it. Say it with"
            " `self.log(..., batch_size=...)`."
        )
    if any(size != first for size in sizes):
        warn_of_ambiguous_batch(first)
    return first


def warn_of_ambiguous_batch(size: int) -> None:
    """Say once that ``size`` may not be the batch size."""
    _warnings.warn(
        f"Trying to infer the `batch_size` from an ambiguous collection: {size} is taken, by which epoch means"
        " are weighted. `self.log(..., batch_size=...)` sets the right one."
    )


def _batch_sizes(data: Any) -> Iterator[int]:
    if isinstance(data, torch.Tensor):
        yield data.size(0) if data.ndim else 1
    elif isinstance(data, Iterable) and not isinstance(data, str):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from _batch_sizes(value)
    elif is_dataclass(data):
        for field in fields(data):
            yield from _batch_sizes(getattr(data, field.name))
