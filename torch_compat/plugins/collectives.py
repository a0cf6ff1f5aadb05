"""Collectives over processes for code of the user's. API: ``lightning.fabric.plugins.collectives``.

They go over the host, through JAX's coordination service: for counters, metrics and decisions. What a step computes with needs
none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Self

import jax
import torch
from torch import Tensor

from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_collectives import reduce_stacked, reduction_name
from xlatrain.cluster import distributed
from xlatrain.cluster.distributed.objects import TIMEOUT_S

__all__ = ["Collective", "SingleDeviceCollective", "TorchCollective"]


class Collective(ABC):
    """Collective operations within a group of processes; tensors are changed in place, as in ``torch.distributed``."""

    def __init__(self) -> None:
        self._group: Any | None = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """The index of this process."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of processes."""

    @property
    def group(self) -> Any:
        """The group.

        Raises:
            RuntimeError: there is none yet.
        """
        if self._group is None:
            raise RuntimeError(f"`{type(self).__name__}` does not own a group: `collective.create_group().group`")
        return self._group

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> Tensor: ...

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str) -> Tensor: ...

    @abstractmethod
    def reduce(self, tensor: Tensor, dst: int, op: str) -> Tensor: ...

    @abstractmethod
    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]: ...

    @abstractmethod
    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor: ...

    @abstractmethod
    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: str) -> Tensor: ...

    @abstractmethod
    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None: ...

    @abstractmethod
    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor: ...

    @abstractmethod
    def barrier(self, device_ids: list[int] | None = None) -> None: ...

    @classmethod
    @abstractmethod
    def is_available(cls) -> bool: ...

    @classmethod
    @abstractmethod
    def is_initialized(cls) -> bool: ...

    @classmethod
    @abstractmethod
    def init_group(cls, **kwargs: Any) -> None: ...

    @classmethod
    @abstractmethod
    def new_group(cls, **kwargs: Any) -> Any: ...

    @classmethod
    @abstractmethod
    def destroy_group(cls, group: Any) -> None: ...

    @classmethod
    def _convert_to_native_op(cls, op: str) -> Any:
        return reduction_name(op)

    def setup(self, **kwargs: Any) -> Self:
        """Join the world, if that has not happened."""
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self, **kwargs: Any) -> Self:
        """Make this collective's group.

        Raises:
            RuntimeError: it has one.
        """
        if self._group is not None:
            raise RuntimeError(f"`{type(self).__name__}` already owns a group.")
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        """Let the group go.

        Raises:
            RuntimeError: there is none.
        """
        group = self.group  # an error where there is none
        self.destroy_group(group)
        self._group = None
        return self


class SingleDeviceCollective(Collective):
    """A world of one process."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def broadcast(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    def all_reduce(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor, **__: Any) -> list[Tensor]:
        return [tensor]

    def gather(self, tensor: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        return [tensor]

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], *_: Any, **__: Any) -> Tensor:
        return scatter_list[0]

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], *_: Any, **__: Any) -> Tensor:
        return input_list[0]

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], *_: Any, **__: Any) -> list[Tensor]:
        return input_tensor_list

    def send(self, *_: Any, **__: Any) -> None:
        """Nobody is there to receive."""

    def recv(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    def barrier(self, *_: Any, **__: Any) -> None:
        """Nobody is waited for."""

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        """The world of one is there."""

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        return object()

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        """Do nothing: no group was made."""


class TorchCollective(Collective):
    """Collectives over all processes of the world, over the host. (The name is stock's, where ``torch.distributed`` does it.)

    Every process makes the same calls in the same order. The world is joined by ``Trainer``, ``Fabric`` or
    ``xlatrain.cluster.distributed.initialize()``; a group of some processes is refused.
    """

    manages_default_group = False

    @property
    def rank(self) -> int:
        return jax.process_index()

    @property
    def world_size(self) -> int:
        return jax.process_count()

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        return _take(tensor, _broadcast(_plain(tensor), src))

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        return _take(tensor, _reduced(_gather(tensor), op))

    def reduce(self, tensor: Tensor, dst: int, op: Any = "sum") -> Tensor:
        found = _reduced(_gather(tensor), op)
        return _take(tensor, found) if self.rank == dst else tensor

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        return _fill(tensor_list, _gather(tensor))

    def gather(self, tensor: Tensor, gather_list: list[Tensor], dst: int = 0) -> list[Tensor]:
        found = _gather(tensor)
        return _fill(gather_list, found) if self.rank == dst else gather_list

    def scatter(self, tensor: Tensor, scatter_list: list[Tensor], src: int = 0) -> Tensor:
        parts = _broadcast([_plain(one) for one in scatter_list] if self.rank == src else None, src)
        return _take(tensor, parts[self.rank])

    def reduce_scatter(self, output: Tensor, input_list: list[Tensor], op: Any = "sum") -> Tensor:
        parts = [row[self.rank] for row in _objects([_plain(one) for one in input_list])]
        return _take(output, _reduced(parts, op))

    def all_to_all(self, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> list[Tensor]:
        rows = _objects([_plain(one) for one in input_tensor_list])
        return _fill(output_tensor_list, [row[self.rank] for row in rows])

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        raise MisconfigurationException(_ALL_TOGETHER.format("send"))

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Tensor:
        raise MisconfigurationException(_ALL_TOGETHER.format("recv"))

    def all_gather_object(self, object_list: list[Any], obj: Any) -> list[Any]:
        """``obj`` of every process, in ``object_list``."""
        object_list[:] = _objects(obj)
        return object_list

    def broadcast_object_list(self, object_list: list[Any], src: int, device: torch.device | None = None) -> list[Any]:
        """The list of process ``src``, in place."""
        object_list[:] = _broadcast(list(object_list), src)
        return object_list

    def gather_object(self, obj: Any, object_gather_list: list[Any], dst: int = 0) -> list[Any]:
        """``obj`` of every process, in ``object_gather_list`` of process ``dst``."""
        found = _objects(obj)
        if self.rank == dst:
            object_gather_list[:] = found
        return object_gather_list

    def scatter_object_list(
        self, scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], src: int = 0
    ) -> list[Any]:
        """Scatter the list of process ``src``: each process gets its object as the first of the output."""
        parts = _broadcast(list(scatter_object_input_list) if self.rank == src else None, src)
        scatter_object_output_list[:1] = [parts[self.rank]]
        return scatter_object_output_list

    def barrier(self, device_ids: list[int] | None = None) -> None:
        distributed.barrier("TorchCollective.barrier")

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names every process that did not come.

        Raises:
            TimeoutError: after ``timeout``.
        """
        seconds = TIMEOUT_S if timeout is None else timeout.total_seconds()
        distributed.barrier("TorchCollective.monitored_barrier", seconds)

    def setup(self, main_address: str | None = None, main_port: str | None = None, **kwargs: Any) -> Self:
        """Join the world, if that has not happened.

        Args:
            main_address: of process 0; by default whoever started the processes says it.
            main_port: the same.
        """
        if main_address is not None or main_port is not None:
            kwargs["coordinator_address"] = f"{main_address or '127.0.0.1'}:{main_port}"
        return super().setup(**kwargs)

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether a world of several processes was joined. (Asking for the number of processes would start JAX.)"""
        return bool(jax.distributed.is_initialized())

    @classmethod
    def init_group(cls, **kwargs: Any) -> None:
        """Join the world; arguments as of ``xlatrain.cluster.distributed.initialize``."""
        distributed.initialize(**kwargs)

    @classmethod
    def new_group(cls, **kwargs: Any) -> Any:
        """The group of all processes.

        Raises:
            MisconfigurationException: only some of them.
        """
        ranks = kwargs.get("ranks")
        if ranks is not None and sorted(ranks) != list(range(jax.process_count())):
            raise MisconfigurationException(
                f"TorchCollective.new_group(ranks={ranks!r}) is not supported: collectives run over all processes; leave it out"
            )
        return _World()

    @classmethod
    def destroy_group(cls, group: Any) -> None:
        """The world stays until the process ends."""


class _World:
    """The group of all processes."""


_ALL_TOGETHER = "TorchCollective.{} is not offered: processes meet in collectives; use broadcast, scatter or all_to_all"


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _objects(obj: Any) -> list[Any]:
    return [obj] if jax.process_count() == 1 else list(distributed.all_gather_object(obj))


def _broadcast(obj: Any, src: int) -> Any:
    if not 0 <= src < jax.process_count():
        raise ValueError(f"src={src}: expected a process, between 0 and {jax.process_count() - 1}")
    return obj if jax.process_count() == 1 else distributed.broadcast_object(obj, src)


def _gather(tensor: Tensor) -> list[Tensor]:
    return _objects(_plain(tensor))


def _reduced(tensors: list[Tensor], op: Any) -> Tensor:
    return reduce_stacked(torch.stack(tensors), reduction_name(op))


def _take(tensor: Tensor, values: Tensor) -> Tensor:
    """``tensor`` with these values."""
    with torch.no_grad():
        tensor.copy_(values)
    return tensor


def _fill(tensors: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    if len(tensors) != len(values):
        raise ValueError(f"expected a list of {len(values)} tensors, one for each process; found {len(tensors)}")
    for tensor, value in zip(tensors, values, strict=True):
        _take(tensor, value)
    return tensors
