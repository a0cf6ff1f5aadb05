"""torchmetrics on several processes: states are gathered through JAX's coordination service, each sample is counted once.

Host code of a process sees its own rows of a batch. So a metric that is updated with values per row holds this process's samples;
one that is updated with a value of the whole batch (a mean loss) would count it on every process, so it counts on one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
import wrapt

from torch_compat.utilities.host_collectives import is_replicated
from xlatrain.cluster.distributed import all_gather_object, world

if TYPE_CHECKING:
    from torchmetrics import Metric

OWN_ROWS = "_own_rows"
"""Set on a tensor that holds this process's rows of a global one."""


def install() -> None:
    """Make torchmetrics synchronize over the processes of this world, where torch.distributed is not in use.

    Also metrics that a hook makes later; where nobody has imported torchmetrics by now, when somebody does: it takes a second.
    """
    if world().process_count > 1:
        wrapt.register_post_import_hook(_patch, "torchmetrics.metric")


def _patch(module: ModuleType) -> None:
    if not hasattr(module.Metric.sync, "__wrapped__"):
        module.Metric.sync = _over_processes(module.Metric.sync)


def gather_states(metric: Metric) -> None:
    """Make the metric's state that of all processes, on each of them. Collective."""
    metric.sync()
    metric._cache, metric._is_synced = None, False


def _over_processes(sync: Any) -> Any:
    @functools.wraps(sync)
    def over_processes(
        self: Metric,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        if not _uses_torch_distributed() and not is_replicated():
            dist_sync_fn = dist_sync_fn or _gather
            distributed_available = distributed_available or _always
        sync(self, dist_sync_fn, process_group, should_sync, distributed_available)

    return over_processes


def _always() -> bool:
    return True


def _uses_torch_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensor of every process, in the order of the processes. Their shapes may differ.

    Raises:
        NotImplementedError: a group of some processes was given.
    """
    if group is not None:
        raise NotImplementedError(
            "a torchmetrics process_group was given: metrics synchronize over all processes here; leave process_group out"
        )
    return all_gather_object(tensor.detach().clone())


def is_per_row(args: Any) -> bool:
    """Whether one of the tensors in ``args`` holds rows of this process."""
    return any(getattr(leaf, OWN_ROWS, False) for leaf in pytree.tree_leaves(args))


@contextlib.contextmanager
def counted_once(metrics: list[Metric]) -> Iterator[None]:
    """Update metrics with a value of the whole batch in the block: the states change on the first process only."""
    if world().process_id == 0:
        yield
        return
    before = [(metric, metric._copy_state_dict()) for metric in metrics]
    yield
    for metric, state in before:
        for name, value in state.items():
            setattr(metric, name, value)


@contextlib.contextmanager
def synchronized_steps(metrics: list[Metric]) -> Iterator[None]:
    """Compute the value of a forward in the block from the global batch."""
    before = [metric.dist_sync_on_step for metric in metrics]
    try:
        for metric in metrics:
            metric.dist_sync_on_step = True
        yield
    finally:
        for metric, value in zip(metrics, before, strict=True):
            metric.dist_sync_on_step = value
