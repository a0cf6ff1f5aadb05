"""The state of optimizers on another device. API: ``lightning.fabric.utilities.optimizer``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_compat.utilities.device_transfer import apply_to_collection, move_data_to_device
from torch_compat.utilities.types import _DEVICE


def _optimizers_to_device(optimizers: Iterable[Optimizer], device: _DEVICE) -> None:
    """:func:`_optimizer_to_device` for each."""
    for optimizer in optimizers:
        _optimizer_to_device(optimizer, device)


def _optimizer_to_device(optimizer: Optimizer, device: _DEVICE) -> None:
    """Move the state to ``device``, but for ``step`` counters on the host, which torch's optimizers keep there."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor):
            group = groups.get(id(parameter), {})
            stays = not (group.get("fused") or group.get("capturable"))
            for name, value in state.items():
                if not (name == "step" and stays):
                    state[name] = apply_to_collection(value, Tensor, move_data_to_device, device=torch.device(device))
        else:
            optimizer.state[parameter] = apply_to_collection(state, Tensor, move_data_to_device, device=torch.device(device))
