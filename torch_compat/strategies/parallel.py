"""Strategies whose collectives run over the processes of a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import torch

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies.parallel_devices import ParallelDevices
from torch_compat.strategies.strategy import Strategy
from torch_compat.utilities.host_collectives import ProcessCollectives


class OnMesh(ProcessCollectives, Strategy):
    """A strategy with nothing left abstract: every device of every process in one mesh."""

    @property
    def root_device(self) -> torch.device:
        """The device on which user code puts tensors; they go to the mesh from there."""
        return self._mesh_run.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is process 0."""
        return jax.process_index() == 0

    def model_to_device(self) -> None:
        if self._mesh_run.executor is not None:
            self._mesh_run.executor.start()


class ParallelStrategy(ParallelDevices, OnMesh):
    """A strategy for several devices. API: ``lightning.pytorch.strategies.ParallelStrategy``.

    Args:
        accelerator: the hardware; None: the Trainer's.
        parallel_devices: devices of each process. The Trainer fills them in; a strategy that starts processes takes them.
        cluster_environment: which world this process joins; None: what started it says.
        checkpoint_io: how checkpoints reach storage; None: sharded directories.
        precision_plugin: dtypes; None: the Trainer's ``precision``.
    """

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.cluster_environment = cluster_environment
        self._parallel_devices = parallel_devices

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """The context of backward passes whose gradients need no synchronisation. XLA places the reductions: nothing to block."""
        yield
