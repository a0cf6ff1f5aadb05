"""Collectives of host code, over processes; inside a captured step the world size is 1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import torch
import torch.utils._pytree as pytree

from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.capturing import is_capturing
from xlatrain.cluster import distributed
from xlatrain.cluster.distributed.objects import TIMEOUT_S

_REDUCTIONS = ("mean", "sum", "min", "max")


_replicated_runs = 0


@contextlib.contextmanager
def replicated_eager() -> Iterator[None]:
    """Eager steps on several processes: within the block, a run or the rest of one, every process computes the whole batch.

    What a step or a hook finds is then the same on all processes, and collectives over processes would count it once for each.
    """
    global _replicated_runs
    _replicated_runs += 1
    try:
        yield
    finally:
        _replicated_runs -= 1


def is_replicated() -> bool:
    """Whether a run is on in which every process computes the whole batch."""
    return _replicated_runs > 0


def inside_step() -> bool:
    """Whether a step is being captured: its batch is the global batch, and there is no other process to talk to."""
    return is_capturing()


def _sees_all() -> bool:
    """Whether what this process has is what all have: values of the whole batch, which count once."""
    return inside_step() or is_replicated() or jax.process_count() == 1


class ProcessCollectives:
    """Collectives between processes: ``barrier``, ``broadcast``, ``all_gather`` and ``reduce`` of every strategy of ours.

    All processes must make the same calls in the same order. They go through JAX's coordination service, not through the
    devices, so that they never come between the collectives of a running program. Objects are pickled:
    processes of one run trust each other.

    Attributes:
        timeout_s: seconds after which a process that did not come is reported, with the place and its index.
    """

    timeout_s: float = TIMEOUT_S

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process is here.

        Raises:
            TimeoutError: names the barrier and the processes that did not come.
        """
        if not inside_step():
            distributed.barrier(name or "barrier", self.timeout_s)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of process ``src``, on every process.

        Args:
            obj: anything that can be pickled: tensors, nested collections, objects. A global array is returned as it is.
            src: index of the process.

        Raises:
            TimeoutError: process ``src`` did not come.
            ValueError: there is no process ``src``.
        """
        if inside_step() or (isinstance(obj, jax.Array) and not obj.is_fully_addressable):
            return obj
        if not 0 <= src < jax.process_count():
            raise ValueError(f"broadcast(src={src}): src is a process, between 0 and {jax.process_count() - 1}")
        if jax.process_count() == 1:
            return obj
        return distributed.broadcast_object(_on_host(obj), src, timeout=self.timeout_s)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """``tensor`` of every process, stacked: ``(processes, …)``. In a captured step, and where steps run eagerly, so that all
        processes have the same, ``tensor[None]``.

        Args:
            tensor: a tensor of the same shape and dtype on every process, or a nested collection of such tensors.
            group: None: all processes.
            sync_grads: whether the result can be differentiated: each process's gradient is the sum over all processes'.

        Raises:
            MisconfigurationException: a process group.
            ValueError: shapes or dtypes that differ between processes.
        """
        refuse_group("all_gather", group)

        def gather(one: torch.Tensor) -> torch.Tensor:
            if _sees_all():
                return one[None] if sync_grads else one.detach()[None]
            if sync_grads:
                return _DifferentiableGather.apply(one, self.timeout_s)  # pyright: ignore[reportReturnType]
            return _stacked(one, self.timeout_s)

        return pytree.tree_map_only(torch.Tensor, gather, tensor)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` reduced over processes. Where values are global, in a captured step and in an eager run, returned as it is.

        Args:
            tensor: a tensor, or a nested collection of tensors; anything that is no tensor is returned unchanged.
            group: None: all processes.
            reduce_op: ``"mean"`` (or ``"avg"``), ``"sum"``, ``"min"``, ``"max"``, or a ``torch.distributed.ReduceOp``.

        Raises:
            MisconfigurationException: a process group.
            ValueError: another reduction.
        """
        refuse_group("reduce", group)
        op = reduction_name(reduce_op)
        if _sees_all():
            return tensor
        return pytree.tree_map_only(torch.Tensor, lambda one: reduce_stacked(_stacked(one, self.timeout_s), op), tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce a decision: True if every process (``all``), or any process, says True."""
        if inside_step() or jax.process_count() == 1:
            return decision
        decisions = distributed.all_gather_object(bool(decision), timeout=self.timeout_s)
        return min(decisions) if all else max(decisions)


class OneDeviceCollectives(ProcessCollectives):
    """Collectives of strategies for one device, where stock stacks nothing: ``all_gather`` adds no dimension."""

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """``tensor`` as it is, whatever ``sync_grads`` says: with its gradient.

        Raises:
            MisconfigurationException: a process group.
        """
        refuse_group("all_gather", group)
        return tensor


def reduction_name(reduce_op: Any) -> str:
    """``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` for what Lightning and torch call a reduction.

    Raises:
        ValueError: anything else.
    """
    name = str("mean" if reduce_op is None else reduce_op).rpartition(".")[2].lower()
    name = "mean" if name == "avg" else name
    if name not in _REDUCTIONS:
        raise ValueError(f"reduce_op={reduce_op!r}; expected one of {', '.join(_REDUCTIONS)}, avg")
    return name


def refuse_group(function: str, group: Any) -> None:
    """Raise ``MisconfigurationException`` for a process group other than all processes."""
    if group is not None and str(group) != "group.WORLD" and type(group).__name__ != "WORLD":
        raise MisconfigurationException(
            f"{function}(group={group!r}) is not supported: collectives run over all processes of the mesh; leave group out"
        )


def _on_host(obj: Any) -> Any:
    """``obj`` with tensors that pickle: live views and tensors with a graph become plain ones."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), obj)


def _stacked(tensor: torch.Tensor, timeout_s: float) -> torch.Tensor:
    found = distributed.all_gather_object(tensor.detach().cpu().clone(), timeout=timeout_s)
    kinds = {(tuple(one.shape), one.dtype) for one in found}
    if len(kinds) > 1:
        listed = ", ".join(
            f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)} on process {i}" for i, one in enumerate(found)
        )
        raise ValueError(f"all_gather and reduce need the same shape and dtype on every process: {listed}")
    return torch.stack(found)


def reduce_stacked(stacked: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce dim 0 of ``(processes, *shape)``; ``op`` is mean, sum, min or max. The mean of integers is float32."""
    if op == "mean":
        return stacked.mean(0) if stacked.is_floating_point() or stacked.is_complex() else stacked.float().mean(0)
    return stacked.sum(0) if op == "sum" else (stacked.amin(0) if op == "min" else stacked.amax(0))


class _DifferentiableGather(torch.autograd.Function):
    """Gather whose gradient is the sum of all processes' gradients with respect to this process's part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, timeout_s: float) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.timeout_s = timeout_s
        return _stacked(tensor, timeout_s)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _stacked(grad, ctx.timeout_s).sum(0)[jax.process_index()], None
