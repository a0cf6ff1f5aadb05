"""Type names that users' annotations import (``lightning.pytorch.utilities.types``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, Required, TypedDict, TypeVar, Union, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

__all__ = [
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "CollectibleGroup",
    "Optimizable",
    "ProcessGroup",
    "RedOpType",
    "ReduceOp",
    "Steppable",
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

if TYPE_CHECKING:
    from torchmetrics import Metric

    _METRIC = Union[Metric, Tensor, int, float]  # noqa: UP007


def __getattr__(name: str) -> Any:
    if name != "_METRIC":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchmetrics import Metric  # imported only when asked for: see torch_compat.utilities.metric_types

    return Union[Metric, Tensor, int, float]  # noqa: UP007


# Unions are spelled with `Union`: users' code evaluates these names at run time (jsonargparse, `typing.get_type_hints`).
_PATH = Union[str, Path]  # noqa: UP007
_DEVICE = Union[torch.device, str, int]  # noqa: UP007
_MAP_LOCATION_TYPE = Union[  # noqa: UP007
    _DEVICE, Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None], dict[_DEVICE, _DEVICE], None
]
_PARAMETERS = Iterator[torch.nn.Parameter]
_NUMBER = Union[int, float]  # noqa: UP007
RedOpType = ReduceOp.RedOpType
STEP_OUTPUT = Union[Tensor, Mapping[str, Any], None]  # noqa: UP007
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = Union[list[Any], list[list[Any]]]  # noqa: UP007
TRAIN_DATALOADERS = Any
EVAL_DATALOADERS = Any

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007
LRSchedulerPLType = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007

_DictKey = TypeVar("_DictKey")
_TORCH_LRSCHEDULER = LRScheduler


@runtime_checkable
class _Stateful(Protocol[_DictKey]):
    """An object with a state that can be saved."""

    def state_dict(self) -> dict[_DictKey, Any]: ...

    def load_state_dict(self, state_dict: dict[_DictKey, Any]) -> None: ...


@runtime_checkable
class CollectibleGroup(Protocol):
    """A group with ``size`` and ``rank``, like a process group of torch."""

    def size(self) -> int: ...

    def rank(self) -> int: ...


@runtime_checkable
class Steppable(Protocol):
    """An object with ``step``."""

    def step(self, closure: Callable[[], Any] | None = ...) -> Any: ...


@runtime_checkable
class Optimizable(Steppable, Protocol):
    """The members of an optimizer that others use."""

    param_groups: list[dict[Any, Any]]
    defaults: dict[Any, Any]
    state: Any

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _SizedIterable(Protocol):
    """An iterable with a length."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass
class LRSchedulerConfig:
    """The configuration by which the Trainer steps a learning-rate scheduler.

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
