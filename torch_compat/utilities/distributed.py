"""Collectives of host code over processes, and samplers. API: ``lightning.fabric.utilities.distributed``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from torch_compat.utilities.data import _num_cpus_available
from torch_compat.utilities.shared_filesystem import is_shared_filesystem

__all__ = ["DistributedSamplerWrapper", "is_shared_filesystem"]


class _DatasetSamplerWrapper(Dataset[Any]):
    """A sampler's output as a dataset of indices; drawn again after :meth:`reset`.

    Raises:
        TypeError: a sampler without a length.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        if not isinstance(sampler, Sized):
            raise TypeError(
                "You seem to have configured a sampler in your DataLoader without `__len__`. Its"
                " indices are shared out among the processes, which needs their number. Give the sampler a `__len__`, or take it"
                " out of the DataLoader, or share them out yourself and pass `Trainer(use_distributed_sampler=False)`."
            )
        self._sampler = sampler
        self._list: list[Any] | None = None

    def __getitem__(self, index: int) -> Any:
        if self._list is None:
            self._list = list(self._sampler)
        return self._list[index]

    def __len__(self) -> int:
        return len(self._sampler)

    def reset(self) -> None:
        """Draw anew."""
        self._list = list(self._sampler)


class DistributedSamplerWrapper(DistributedSampler):
    """A ``DistributedSampler`` over what another sampler gives. The Trainer needs none: it splits every loader's batches.

    Args:
        sampler: any sampler with a length.
        *args: of ``DistributedSampler``, after its dataset.
        **kwargs: the same.
    """

    def __init__(self, sampler: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_DatasetSamplerWrapper(sampler), *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        self.dataset.reset()  # pyright: ignore[reportAttributeAccessIssue]
        return (self.dataset[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        original = self.dataset._sampler  # pyright: ignore[reportAttributeAccessIssue]
        if callable(getattr(original, "set_epoch", None)):
            original.set_epoch(epoch)


def _distributed_is_initialized() -> bool:
    """Whether *torch's* process group is there, for code that calls ``torch.distributed`` next. A mesh needs none."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _gather_all_tensors(result: Tensor, group: Any | None = None) -> list[Tensor]:
    """``result`` of every process, whose shapes may differ; inside of a captured step the world size is 1."""
    import jax

    from torch_compat.utilities.host_collectives import inside_step, refuse_group
    from xlatrain.cluster import distributed

    refuse_group("_gather_all_tensors", group)
    if inside_step() or jax.process_count() == 1:
        return [result]
    return list(distributed.all_gather_object(result.detach().cpu().clone()))


def _sync_ddp_if_available(result: Tensor, group: Any | None = None, reduce_op: Any | None = None) -> Tensor:
    """``result`` reduced over processes: the sum, unless ``reduce_op`` says otherwise."""
    from torch_compat.utilities.host_collectives import ProcessCollectives

    return ProcessCollectives().reduce(result, group, "sum" if reduce_op is None else reduce_op)


_sync_ddp = _sync_ddp_if_available


def _all_gather_ddp_if_available(tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
    """``tensor`` of every process, stacked: ``(processes, …)``; of one process as it is."""
    import jax

    from torch_compat.utilities.host_collectives import ProcessCollectives, inside_step

    if inside_step() or jax.process_count() == 1:
        return tensor
    return ProcessCollectives().all_gather(tensor, group, sync_grads)


def _get_default_process_group_backend_for_device(device: torch.device) -> str:
    """The backend that ``torch.distributed`` would use for a device."""
    return torch.distributed.get_default_backend_for_device(device)


def _suggested_max_num_threads(num_processes: int = 1) -> int:
    """Threads for each of ``num_processes`` processes on this host.

    Raises:
        ValueError: less than one process.
    """
    if num_processes < 1:
        raise ValueError(f"`num_processes` should be >= 1, got {num_processes}.")
    return max(1, _num_cpus_available() // num_processes)


def _set_num_threads_if_needed(num_processes: int = 1) -> None:
    """Limit torch's threads to this process's share of the cores, unless ``OMP_NUM_THREADS`` says how many."""
    if "OMP_NUM_THREADS" not in os.environ:
        threads = _suggested_max_num_threads(num_processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _is_dtensor(tensor: object) -> bool:
    """Whether it is a ``torch.distributed.tensor.DTensor``."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
