"""Apple's GPUs, which JAX does not drive here. API: ``lightning.pytorch.accelerators.MPSAccelerator``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torch_compat.accelerators.accelerator import Accelerator
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.registry import AcceleratorRegistryType

_WHY = "MPSAccelerator is not offered: JAX does not drive Apple's GPUs here; use accelerator='cpu'"


class MPSAccelerator(Accelerator):
    """Apple's GPUs: never available; asking whether they are is answered, using them is refused.

    Raises:
        MisconfigurationException: when it is made, or its devices are asked for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MisconfigurationException(_WHY)

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def auto_device_count() -> int:
        """Always 1, as in Lightning, whether there is a device or not."""
        return 1

    @staticmethod
    def name() -> str:
        return "mps"

    @classmethod
    def register_accelerators(cls, accelerator_registry: AcceleratorRegistryType) -> None:
        accelerator_registry.register("mps", cls, description=cls.__name__, override=True)

    @staticmethod
    def parse_devices(devices: Any) -> NoReturn:
        raise MisconfigurationException(_WHY)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        raise MisconfigurationException(_WHY)


def _get_all_available_mps_gpus() -> list[int]:
    return []
