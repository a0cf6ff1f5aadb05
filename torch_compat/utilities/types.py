"""Type names that users' annotations import (``lightning.pytorch.utilities.types``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Required, TypedDict, Union

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer
from torchmetrics import Metric

__all__ = [
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "DistributedDataParallel",
    "LRSchedulerConfig",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
]

# Unions are spelled with `Union`: users' code evaluates these names at run time (jsonargparse, `typing.get_type_hints`).
_METRIC = Union[Metric, Tensor, int, float]  # noqa: UP007
STEP_OUTPUT = Union[Tensor, Mapping[str, Any], None]  # noqa: UP007
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = Union[list[Any], list[list[Any]]]  # noqa: UP007
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007
LRSchedulerPLType = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007


@dataclass
class LRSchedulerConfig:
    """How the Trainer steps one learning-rate scheduler.

    Attributes:
        scheduler: the torch scheduler.
        name: under which ``LearningRateMonitor`` logs it; made from the optimizer's class when None.
        interval: ``"epoch"`` or ``"step"``.
        frequency: step it every so many intervals.
        reduce_on_plateau: whether the scheduler takes a monitored value.
        monitor: the name of that value among the logged ones.
        strict: raise if it was not logged; else warn and skip.
    """

    scheduler: LRSchedulerTypeUnion
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


class LRSchedulerConfigType(TypedDict, total=False):
    """The ``"lr_scheduler"`` dict that ``configure_optimizers`` may return; keys as in :class:`LRSchedulerConfig`."""

    scheduler: Required[LRSchedulerTypeUnion]
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """A dict with only an optimizer, as ``configure_optimizers`` may return it."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict):
    """A dict with an optimizer and its scheduler, as ``configure_optimizers`` may return it."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: NotRequired[str]


OptimizerLRScheduler = Union[  # noqa: UP007
    Optimizer,
    Sequence[Optimizer],
    tuple[Sequence[Optimizer], Sequence[Union[LRSchedulerTypeUnion, LRSchedulerConfig]]],  # noqa: UP007
    OptimizerConfig,
    OptimizerLRSchedulerConfig,
    Sequence[OptimizerConfig],
    Sequence[OptimizerLRSchedulerConfig],
    None,
]
