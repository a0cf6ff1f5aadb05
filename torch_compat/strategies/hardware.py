"""The common part of the strategies of the Trainer and of Fabric: the hardware, and which process this is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch_compat.accelerators.accelerator import Accelerator
    from torch_compat.utilities.registry import StrategyRegistryType


class HardwareOfStrategy(ABC):
    """The part of a strategy that knows its accelerator and where user code puts tensors."""

    _accelerator: Accelerator | None

    @property
    def accelerator(self) -> Accelerator | None:
        """The hardware plugin."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def launcher(self) -> Any:
        """The launcher of the processes; None: they were started from outside."""
        return None

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device on which user code puts tensors on this process; they go to the mesh from there."""

    @property
    @abstractmethod
    def is_global_zero(self) -> bool:
        """Whether this is process 0."""

    @property
    def local_rank(self) -> int:
        """Always 0: one process drives all devices of its host."""
        return 0

    @classmethod  # noqa: B027
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        """Registers the names of the class."""
