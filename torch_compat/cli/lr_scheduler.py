"""Optimizers and learning-rate schedulers as types of the command line. API: ``lightning.pytorch.cli``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Union

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """torch's ``ReduceLROnPlateau`` that also says which logged metric it watches.

    Args:
        optimizer: whose learning rate it reduces.
        monitor: name of the logged metric.
        *args: torch's own arguments, after ``optimizer``.
        **kwargs: the same by name.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


# torch's own ReduceLROnPlateau is none of these: without `monitor` the Trainer would not know what to give it.
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007  the parser shows it in its help
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007

OptimizerCallable = Callable[[Iterable], Optimizer]
"""A module's ``__init__`` argument that makes an optimizer of parameters; given as class path and arguments."""
LRSchedulerCallable = Callable[[Optimizer], Union[LRScheduler, ReduceLROnPlateau]]  # noqa: UP007
"""The same for a scheduler of an optimizer."""
