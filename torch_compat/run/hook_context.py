"""A run as the callers of its hooks see it: protocols that a Trainer and its strategy fulfil."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from torch_compat.callbacks.callback import Callback
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.loggers.logger import Logger
from torch_compat.plugins.precision import Precision
from torch_compat.profilers import Profiler
from torch_compat.run.states import TrainerState


class HookedStrategy(Protocol):
    """A strategy whose own members are hooks, too; for each see ``torch_compat.strategies``."""

    @property
    def call_configure_sharded_model_hook(self) -> bool: ...

    @call_configure_sharded_model_hook.setter
    def call_configure_sharded_model_hook(self, mode: bool) -> None: ...

    @property
    def root_device(self) -> torch.device: ...

    def overrides(self, name: str) -> bool: ...

    def barrier(self, name: str | None = None) -> None: ...

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any: ...

    def model_sharded_context(self) -> AbstractContextManager[None]: ...

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]: ...

    def optimizer_zero_grad(self, current_epoch: int, batch_idx: int, optimizer: Any) -> None: ...

    def on_train_epoch_end(self) -> None: ...


class HookContext(Protocol):
    """The surroundings of a hook. Callbacks get the object itself: to them it is the Trainer.

    Attributes:
        callbacks: in the order in which they are called.
        datamodule: the last that a run was given.
        run_datamodule: that of the current or last run.
        era: the run's hooks of eras 1.3 to 1.6, see :mod:`torch_compat.run.eras`; None where it has no objects of theirs.
    """

    _module: LightningModule | None
    callbacks: list[Callback]
    datamodule: LightningDataModule | None
    run_datamodule: LightningDataModule | None
    era: Any
    profiler: Profiler
    state: TrainerState

    @property
    def lightning_module(self) -> LightningModule: ...

    @property
    def strategy(self) -> HookedStrategy: ...

    @property
    def precision_plugin(self) -> Precision: ...

    @property
    def loggers(self) -> list[Logger]: ...

    @property
    def current_epoch(self) -> int: ...
