"""torch_tpu, the successor of torch-xla: torch's own eager mode on a TPU chip. https://github.com/google-pytorch/torch_tpu

Written after its documentation: there is no CPU mode, and no TPU where this was developed, so that it has never been run.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from torch_compat.device_backends.backend import DeviceBackend
from torch_compat.device_backends.requirements import require_torch_tpu
from torch_compat.utilities.exceptions import MisconfigurationException


class TorchTPU(DeviceBackend):
    """A TPU chip as ``torch.device("tpu")``; importing the package registers it.

    Args:
        strategy: who asks, for errors.
        platform: None or ``"tpu"``.
        devices: None or 1.

    Raises:
        MisconfigurationException: the package or the chip is missing, or something else than one chip is asked for.
    """

    name = "torch_tpu"
    platform = "tpu"

    def __init__(self, strategy: str, platform: str | None, devices: int | None) -> None:
        require_torch_tpu(strategy)
        if platform not in (None, "tpu") or devices not in (None, 1):
            raise MisconfigurationException(
                f"{strategy} drives one TPU chip (accelerator='tpu', devices=1), not accelerator={platform!r}, devices="
                f"{devices}; for several chips leave strategy out: JAX drives them all"
            )
        importlib.import_module("torch_tpu")
        self._module: Any = getattr(torch, "tpu", None)
        if self._module is None or not self._module.is_available():
            raise MisconfigurationException(f"{strategy}: torch_tpu is installed, but finds no TPU on this machine")

    @property
    def root_device(self) -> torch.device:
        return torch.device("tpu", 0)

    def manual_seed(self, seed: int) -> None:
        self._module.manual_seed(seed)

    def random_state(self) -> torch.Tensor:
        return self._module.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        self._module.set_rng_state(state)
