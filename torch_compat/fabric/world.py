"""The world of a Fabric: its devices and processes, and what these tell each other. API: ``lightning.fabric.Fabric`` 2.6."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, TypeVar

import jax
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from torch_compat.fabric.strategies.strategy import Strategy
from torch_compat.utilities.device_transfer import convert_to_tensors
from torch_compat.utilities.parts import of

T = TypeVar("T")


class World:
    """The part of Fabric that asks its strategy who is there, and lets processes talk."""

    _strategy: Strategy
    _launched: bool

    _precision: Any = of("_strategy.precision")
    accelerator: Any = of("_strategy.accelerator", "The hardware plugin.")

    @property
    def strategy(self) -> Strategy:
        """Changes how modules, optimizers, data and checkpoints are dealt with."""
        return self._strategy

    device: torch.device = of(
        "_strategy.root_device", "The device on which user code puts tensors on this process; they go to the mesh from there."
    )
    global_rank: int = of("_strategy.global_rank", "Mesh index of this process's first device.")
    local_rank: int = of("_strategy.local_rank", "Always 0: one process drives all devices of its host.")
    node_rank: int = of("_strategy.node_rank", "The index of this process.")
    world_size: int = of("_strategy.world_size", "Devices in the mesh.")
    is_global_zero: bool = of("_strategy.is_global_zero", "Whether this is process 0.")

    def _check_launched(self) -> None:
        if not self._launched and self.world_size > 1:
            raise RuntimeError("To use Fabric with more than one device, you must call `.launch()` first: `fabric.launch()`.")

    # -- collectives -----------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Waits until every process is here."""
        self._check_launched()
        self._strategy.barrier(name=name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """``obj`` of process ``src``, on every process."""
        self._check_launched()
        return self._strategy.broadcast(obj, src=src)

    def all_gather(self, data: Any, group: Any | None = None, sync_grads: bool = False) -> Any:
        """Tensors (and numbers) of every process, stacked; as they are where the strategy is for a single device."""
        self._check_launched()
        data = convert_to_tensors(data, device=self.device)
        return apply_to_collection(data, Tensor, self._strategy.all_gather, group=group, sync_grads=sync_grads)

    def all_reduce(self, data: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Tensors (and numbers) reduced over processes.

        ::

            loss = fabric.all_reduce(model(batch).mean(), reduce_op="mean")
        """
        self._check_launched()
        data = convert_to_tensors(data, device=self.device)
        return apply_to_collection(data, Tensor, self._strategy.all_reduce, group=group, reduce_op=reduce_op)

    @contextlib.contextmanager
    def rank_zero_first(self, local: bool = False) -> Generator[None, None, None]:
        """The block runs on process 0 first, then on the others (``local``: on each host, which has one process: together)."""
        waits = not local and jax.process_index() > 0
        if waits:
            self.barrier("rank_zero_first")
        try:
            yield
        finally:
            if not local and not waits:
                self.barrier("rank_zero_first")
