"""A user's ``DataLoader`` of batch size b, re-batched so that the mesh's global batch is replicas × b.

On one process the result draws exactly what stock Lightning draws on one device with batch size replicas × b: same samples,
same order, same draws from torch's random generators. On several processes each loads its own rows of those batches.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from torch_compat.run.batches import take_rows
from torch_compat.trainer.data import grain_loaders
from torch_compat.trainer.data.samplers import (
    Broadcast,
    ExpandedSampler,
    JoinedBatches,
    ProcessBatches,
    ProcessItems,
    SharedStream,
)
from torch_compat.trainer.data.workers import worker_context
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.seed import worker_seeding
from torch_compat.utilities.single_process import in_less_time
from torch_compat.utilities.warnings import PossibleUserWarning
from xlatrain.cluster.distributed import Channel
from xlatrain.cluster.launch import ELASTIC
from xlatrain.mesh.data import BatchLayout
from xlatrain.mesh.lockstep import lockstep

_samplers = itertools.count()


def prepare_dataloader(
    loader: Any,
    replicas_total: int,
    process_index: int = 0,
    process_count: int = 1,
    mode: str = "train",
    use_distributed_sampler: bool = True,
    *,
    overfit: bool = False,
    layout: BatchLayout | None = None,
    world_size: int | None = None,
    broadcast: Broadcast | None = None,
) -> Any:
    """The loader to iterate instead of ``loader``, to get this process's rows of the global batches.

    - A ``DataLoader`` with a ``batch_size``: batches of ``replicas_total * batch_size`` samples of its sampler.
    - with a ``batch_sampler`` of the user's: ``replicas_total`` consecutive batches make one.
    - with a ``DistributedSampler``: the global stream that its ranks share, then as above.
    - over an ``IterableDataset``: each process draws batches of (its replicas) × ``batch_size`` from its own stream.
    - without automatic batching (``batch_size=None``), a ``grain.MapDataset``, or any other iterable: each item is one process's
      batch.

    The loader itself is not changed: what is returned is a shallow copy (of the same class, with every attribute) whose sampler
    is replaced. Its constructor is not run again, so subclasses with other constructors work.

    Args:
        loader: a ``DataLoader``, or any iterable of batches.
        replicas_total: into how many parts the mesh splits a batch.
        process_index, process_count: this process among those of the mesh, each with an equal block of the replicas.
        mode: ``"train"``, ``"validate"``, ``"test"``, ``"predict"`` or ``"sanity_check"`` (``RunningStage``). For
            ``"predict"`` the last incomplete batch is kept even if the loader would drop it, and
            ``batch_sampler.seen_batch_indices`` says which samples this process had in each batch.
        use_distributed_sampler: False leaves the loader's batches as they are: each is one process's batch. A
            ``DistributedSampler`` of the user's is expanded all the same.
        overfit: take the samples in order, whatever the loader's sampler.
        layout: which replicas each process holds, where these are not equal contiguous blocks.
        world_size: what ``trainer.world_size`` says, if that is more than the replicas: a user's ``DistributedSampler`` may
            have been made with it.
        broadcast: gives every process the value of process 0; by default between the processes of the world.

    Raises:
        MisconfigurationException: a loader that cannot be re-batched, with the reason and what to do.
    """
    if layout is None:
        layout = BatchLayout.contiguous(replicas_total, process_index, process_count)
    if os.environ.get(ELASTIC):
        _check_elastic(loader, use_distributed_sampler)
    if mode == "train" and use_distributed_sampler and len(layout.local) > 1:
        _warn_of_ready_batches(loader, len(layout.local))
    if not isinstance(loader, DataLoader):
        loader = grain_loaders.prepared(loader, layout if use_distributed_sampler else BatchLayout.contiguous(1)) or loader
        return loader if layout.processes == 1 or isinstance(loader, grain_loaders.GrainItems) else TogetherIterable(loader)
    if overfit:
        loader = _in_order(loader, mode)
    if isinstance(loader.dataset, IterableDataset):
        prepared = _larger_batches(loader, len(layout.local)) if use_distributed_sampler else loader
    else:
        prepared = _rebatched(loader, layout, world_size or 0, mode == "predict", use_distributed_sampler, broadcast)
    if layout.processes > 1 and not isinstance(_index_sampler(prepared), (ProcessBatches, ProcessItems)):
        prepared = _shallow(prepared, _iterator=None)  # each process draws from a stream of its own
        prepared.__class__ = _with_iter(type(prepared), _together, _alone=type(prepared).__iter__)
    context = worker_context(prepared)
    if context is not None:
        prepared = prepared if prepared is not loader else _shallow(loader, _iterator=None)
        prepared.multiprocessing_context = context
    seeding = worker_seeding(prepared)
    if seeding is not None:
        prepared = prepared if prepared is not loader else _shallow(loader, _iterator=None)
        prepared.worker_init_fn = seeding
    return prepared


def _check_elastic(loader: Any, rebatch: bool) -> None:
    """Raises:
    MisconfigurationException: whose batches would be others on fewer processes.
    """
    why = None
    if not isinstance(loader, DataLoader):
        why = f"`{type(loader).__qualname__}` is no DataLoader: each process brings batches of its own"
    elif isinstance(loader.dataset, IterableDataset):
        why = f"each process draws its own stream of `{type(loader.dataset).__qualname__}`, an IterableDataset"
    elif loader.batch_sampler is None:
        why = "a DataLoader(batch_size=None) gives ready batches, one for each process"
    elif not rebatch:
        why = "with use_distributed_sampler=False each process brings batches of its own"
    if why is not None:
        raise MisconfigurationException(
            "`xlatrain launch --elastic` keeps the global batch, and every sample once an epoch, on any number of processes, but "
            f"{why}. Give a DataLoader with a batch_size over a dataset with indices, or launch with --processes, --max-restarts"
        )


def _parts_of_batch(layout: BatchLayout) -> int:
    """How many of the user's batches make a global one: the replicas of the mesh; of an elastic launch those of its full mesh.

    Raises:
        MisconfigurationException: the full mesh has no whole number of them.
    """
    most = int(os.environ.get(ELASTIC) or layout.processes)
    if layout.count * most % layout.processes:
        raise MisconfigurationException(
            f"--elastic: {layout.processes} processes hold {layout.count} data-parallel replicas, so {most} processes "
            "would hold no whole number of them: keep axes that split no batch (tensor, context, stage) within a process"
        )
    return layout.count * most // layout.processes


def _warn_of_ready_batches(loader: Any, devices: int) -> None:
    """Say that batches which the user's code makes do not grow with the number of devices."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        return
    how = "without a `batch_size` or `batch_sampler`" if isinstance(loader, DataLoader) else "no DataLoader"
    rank_zero_warn(
        f"`{type(loader).__qualname__}` ({how}) gives ready batches: the {devices} devices of a process share each of them, so "
        f"that a step on {devices} devices takes one such batch and not {devices}. For a larger batch make them larger or give a "
        "DataLoader a `batch_size`; `Trainer(use_distributed_sampler=False)` says that it is meant so. See docs/sharding.md",
        category=PossibleUserWarning,
    )


def _rebatched(
    loader: DataLoader, layout: BatchLayout, world_size: int, predict: bool, rebatch: bool, broadcast: Any
) -> DataLoader:
    batches, sampler = _expanded(loader, {layout.count, layout.processes, world_size})
    rebatch = rebatch or sampler is not loader.sampler or batches is not loader.batch_sampler
    if batches is None:  # the dataset gives whole batches
        if layout.processes == 1 or not rebatch:
            return loader
        items = ProcessItems(_shared(sampler, layout, broadcast), layout)
        return _copy(loader, sampler=items)
    if predict:
        batches = _keep_last(batches, sampler)
    if rebatch and (parts := _parts_of_batch(layout)) > 1:
        batches = _joined(batches, parts)
    if rebatch and layout.processes > 1:
        batches = ProcessBatches(_shared(batches, layout, broadcast), layout, record=predict)
    elif predict:
        batches = ProcessBatches(batches, BatchLayout.contiguous(1), record=True, required=rebatch and layout.count > 1)
    if batches is loader.batch_sampler:
        return loader
    return _copy(loader, sampler=sampler, batch_sampler=batches)


def _expanded(loader: DataLoader, world_sizes: set[int]) -> tuple[Any, Any]:
    """The loader's batch sampler and sampler, a ``DistributedSampler`` in either replaced by its global stream.

    One whose number of replicas is none of ``world_sizes`` is a split that the user wants for itself, and stays.
    """

    def is_part(sampler: Any) -> bool:
        return isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 and sampler.num_replicas in world_sizes

    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is None:
        return None, ExpandedSampler(sampler) if is_part(sampler) else sampler  # pyright: ignore[reportArgumentType]
    inner = getattr(batches, "sampler", None)
    if is_part(inner):
        expanded = ExpandedSampler(inner)  # pyright: ignore[reportArgumentType]
        return _shallow(batches, sampler=expanded), expanded if sampler is inner else sampler
    return batches, sampler


def _joined(batches: Any, replicas: int) -> Any:
    if type(batches) is BatchSampler:
        return BatchSampler(batches.sampler, batches.batch_size * replicas, batches.drop_last)
    return JoinedBatches(batches, replicas, bool(getattr(batches, "drop_last", False)))


def _keep_last(batches: Any, sampler: Any) -> Any:
    """The batch sampler without ``drop_last``: predictions are wanted for every sample.

    As in stock a plain ``BatchSampler`` of the user's takes the samples that the loader's own ``sampler`` gives: all, in order.
    """
    if type(batches) is BatchSampler and batches.sampler is not sampler:
        rank_zero_warn(
            "predict: the `sampler` of the DataLoader's `BatchSampler` is replaced by the DataLoader's own, so that every sample "
            "is predicted, in order. To keep yours, make it a class of your own without `drop_last`."
        )
        return BatchSampler(sampler, batches.batch_size, drop_last=False)
    if not hasattr(batches, "drop_last"):
        rank_zero_warn(
            f"You are using a custom batch sampler `{type(batches).__qualname__}` for prediction. It is used unchanged: if it "
            "drops a last short batch, there is no prediction for these samples.",
            category=PossibleUserWarning,
        )
        return batches
    return _shallow(batches, drop_last=False) if batches.drop_last else batches


def _shared(stream: Any, layout: BatchLayout, broadcast: Broadcast | None) -> Any:
    if broadcast is None:
        # Of its own: a preemption may interrupt a loader on one process before, and on another after, its part of a broadcast.
        broadcast = Channel(f"sampler/{next(_samplers)}").broadcast
    return SharedStream(stream, broadcast, is_source=layout.position == 0)


def _larger_batches(loader: DataLoader, replicas: int) -> DataLoader:
    batches = loader.batch_sampler
    if replicas == 1 or batches is None:
        return loader
    return _copy(loader, batch_sampler=_joined(batches, replicas))


def _in_order(loader: DataLoader, mode: str) -> DataLoader:
    """``overfit_batches``: the same samples every epoch, in the dataset's order."""
    if isinstance(loader.sampler, SequentialSampler) or isinstance(loader.dataset, IterableDataset):
        return loader
    prefix = {"train": "train", "validate": "val", "sanity_check": "val", "test": "test", "predict": "predict"}.get(mode, mode)
    rank_zero_warn(
        f"You requested to overfit but enabled {prefix} dataloader shuffling: the same batches come in each epoch, unshuffled."
    )
    sampler = SequentialSampler(loader.dataset)  # pyright: ignore[reportArgumentType]
    batches = loader.batch_sampler
    if batches is None:
        return _copy(loader, sampler=sampler)
    if not hasattr(batches, "sampler"):
        raise MisconfigurationException(
            f"overfit_batches needs the samples in order, but the batch sampler `{type(batches).__qualname__}` has no attribute"
            " `sampler` to replace; give the DataLoader a `batch_size` instead of a `batch_sampler` while you overfit"
        )
    return _copy(loader, sampler=sampler, batch_sampler=_shallow(batches, sampler=sampler))


# -------------------------------------------------------------------------------------------------------------- copies


def _shallow(value: Any, **attributes: Any) -> Any:
    """A shallow copy with other attributes, past any ``__setattr__``; the constructor is not run."""
    copied = object.__new__(type(value))
    copied.__dict__.update(vars(value))
    copied.__dict__.update(attributes)
    return copied


def _copy(loader: DataLoader, **attributes: Any) -> DataLoader:
    """A shallow copy of a loader with other samplers."""
    batches = attributes.get("batch_sampler", loader.batch_sampler)
    has_own_iter = type(loader).__iter__ is not DataLoader.__iter__
    if has_own_iter and batches is not None and not isinstance(batches, ProcessBatches):
        batches = attributes["batch_sampler"] = ProcessBatches(batches, BatchLayout.contiguous(1))  # counts what is drawn
    attributes["batch_size"] = _batch_size(batches, loader)
    copied = _shallow(loader, **attributes, _iterator=None)
    if has_own_iter or isinstance(batches, ProcessBatches) or isinstance(attributes.get("sampler"), ProcessItems):
        copied.__class__ = _with_iter(type(loader), _checked)
    if copied.num_workers and not copied.in_order and isinstance(batches, ProcessBatches):
        rank_zero_warn("`in_order=False` is not kept on several processes: all must take the same global batch at the same step.")
        copied.in_order = True
    return copied


def _batch_size(batches: Any, loader: DataLoader) -> int | None:
    """The global batch size, as ``loader.batch_size``; None with a batch sampler of the user's, as in torch."""
    while isinstance(batches, (ProcessBatches, SharedStream)):
        batches = batches.batches if isinstance(batches, ProcessBatches) else batches.stream
    return None if loader.batch_size is None or batches is None else batches.batch_size


@functools.cache
def _with_iter(kind: type, iterate: Callable[[Any, Iterator[Any]], Iterator[Any]], **attributes: Any) -> type:
    """``kind`` with ``iterate`` around its iterators; looks like ``kind`` otherwise."""
    body = {
        "__iter__": lambda self: iterate(self, in_less_time(kind.__iter__(self))),
        "__module__": kind.__module__,
        "__reduce_ex__": lambda self, protocol: (_without_state, (kind, iterate, attributes), vars(self)),
        **attributes,
    }
    return type(kind.__name__, (kind,), body)


def _without_state(kind: type, iterate: Callable[[Any, Iterator[Any]], Iterator[Any]], attributes: dict[str, Any]) -> Any:
    """An instance of the class that :func:`_with_iter` makes, for pickle, which does not find that class by its name."""
    return object.__new__(_with_iter(kind, iterate, **attributes))


def _index_sampler(loader: DataLoader) -> Any:
    """The sampler from which the loader's workers get their indices."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _together(loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    return lockstep(batches, f"`{type(loader).__qualname__}`")


class TogetherIterable:
    """A user's iterable of batches, iterated by all processes together; every attribute is the iterable's own."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    @property
    def alone(self) -> Iterable[Any]:
        """The user's iterable."""
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        return _together(self._batches, iter(self._batches))

    def __len__(self) -> int:
        return len(self._batches)  # pyright: ignore[reportArgumentType]  # TypeError where it has none, as for itself

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def iterate_alone(loader: Any) -> Iterator[Any]:
    """Iterate this process's batches, drawn when asked for: the caller sees to it that all processes do so together."""
    if isinstance(loader, TogetherIterable):
        return iter(loader.alone)
    alone = getattr(type(loader), "_alone", None)
    return in_less_time(iter(loader) if alone is None else alone(loader))


def _checked(loader: DataLoader, batches: Iterator[Any]) -> Iterator[Any]:
    """Cuts batches that were only loaded as a pattern down to no rows; refuses a loader that ignores its sampler."""
    sampler = _index_sampler(loader)
    passed_over = getattr(batches, "_num_yielded", 0)  # by a StatefulDataLoader that continues
    for i, batch in enumerate(batches, start=passed_over):
        if sampler.required and not sampler.sizes:
            raise MisconfigurationException(
                f"`{type(loader).__qualname__}.__iter__` does not take its indices from `self.batch_sampler`, so its batches"
                " cannot be enlarged to the mesh's global batch; iterate `super().__iter__()`, or set"
                " `Trainer(use_distributed_sampler=False)`: then each batch is split over the devices as it is"
            )
        yield take_rows(batch, 0) if i < len(sampler.sizes) and sampler.sizes[i] == 0 else batch
