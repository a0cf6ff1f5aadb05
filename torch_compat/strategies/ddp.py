"""Data parallelism: the batch is split over all devices, parameters are whole on each."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from torch_compat.plugins.precision import Precision
from torch_compat.strategies.strategy import Strategy
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info

_TIMEOUT = timedelta(seconds=1800)
_PERFORMANCE_ONLY = (
    "bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "broadcast_buffers", "find_unused_parameters", "dim",
    "check_reduction", "delay_all_reduce_named_params", "init_sync", "skip_all_reduce_unused_params", "bucket_cap_mb_list",
)  # fmt: skip


class DDPStrategy(Strategy):
    """One ``data`` axis over every device of every process. API: ``lightning.pytorch.strategies.DDPStrategy``.

    Arguments that tune NCCL's bucketing change no number and have nothing to tune here: a notice says so. Communication hooks
    are refused.
    """

    strategy_name = "ddp"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Any = None,
        ddp_comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        start_method: str = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        refuse(
            type(self).__name__,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
        )
        if precision_plugin is not None:
            self.precision_plugin = precision_plugin
        tuning = {name: value for name, value in kwargs.items() if name in _PERFORMANCE_ONLY}
        if unknown := sorted(set(kwargs) - set(tuning)):
            raise TypeError(f"{type(self).__name__}() got unexpected arguments {unknown}")
        unused = [
            *tuning,
            *(["process_group_backend"] if process_group_backend else []),
            *(["timeout"] if timeout != _TIMEOUT else []),
        ]
        unused += ["start_method"] if start_method != "popen" else []
        if unused:
            rank_zero_info(
                f"{type(self).__name__}: {', '.join(sorted(unused))} tune torch's process groups; XLA's collectives have "
                "no such setting"
            )


class SingleDeviceStrategy(Strategy):
    """One device. API: ``lightning.pytorch.strategies.SingleDeviceStrategy``."""

    strategy_name = "single_device"

    def __init__(
        self, device: Any = "cpu", accelerator: Any = None, checkpoint_io: Any = None, precision_plugin: Precision | None = None
    ) -> None:
        super().__init__()
        refuse(type(self).__name__, accelerator=accelerator, checkpoint_io=checkpoint_io)
        torch.device(device)  # an invalid name raises here
        if precision_plugin is not None:
            self.precision_plugin = precision_plugin

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        if n_devices != 1:
            raise MisconfigurationException(f"strategy='single_device' with {n_devices} devices; set devices=1 or strategy='ddp'")
        return {"data": 1}


_INSTEAD = {
    "accelerator": "set Trainer(accelerator=…)",
    "parallel_devices": "set Trainer(devices=…)",
    "cluster_environment": "start the processes with `xlatrain launch`, torchrun or SLURM; they are detected",
    "checkpoint_io": "checkpoints are sharded directories written by Orbax; there is one format in this version",
    "ddp_comm_hook": "XLA chooses and compiles the collectives",
    "ddp_comm_state": "XLA chooses and compiles the collectives",
    "ddp_comm_wrapper": "XLA chooses and compiles the collectives",
    "model_averaging_period": "post-local SGD is not offered",
    "cpu_offload": "shard over more devices instead",
    "activation_checkpointing": "call torch.utils.checkpoint in the module; it is captured",
    "activation_checkpointing_policy": "call torch.utils.checkpoint in the module; it is captured",
    "mixed_precision": "set Trainer(precision='bf16-mixed')",
}


def refuse(owner: str, **arguments: Any) -> None:
    """Raise for the first argument that was given (is not None)."""
    for name, value in arguments.items():
        if value is not None:
            raise MisconfigurationException(f"{owner}({name}=…) is not supported on an XLA mesh: {_INSTEAD[name]}")
