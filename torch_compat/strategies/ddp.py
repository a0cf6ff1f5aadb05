"""Data parallelism: the batch is split over all devices, parameters are whole on each."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies.parallel import ParallelStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info
from torch_compat.utilities.registry import StrategyRegistryType

TIMEOUT = timedelta(seconds=1800)
_PERFORMANCE_ONLY = (
    "bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "broadcast_buffers", "find_unused_parameters", "dim",
    "check_reduction", "delay_all_reduce_named_params", "init_sync", "skip_all_reduce_unused_params", "bucket_cap_mb_list",
)  # fmt: skip


class DDPStrategy(ParallelStrategy):
    """Data parallelism: a ``data`` axis over every device of every process. API: ``lightning.pytorch.strategies.DDPStrategy``.

    Arguments that tune NCCL's bucketing change no number and have nothing to tune here: a notice says so. Communication hooks
    are refused.

    Args:
        timeout: after which a process that does not come to a collective of host code, or makes no progress in a run, is reported
            (:mod:`xlatrain.cluster.watch`).
        start_method: ``"popen"`` or ``"spawn"``: the processes were started from outside. Others are refused.
        no_recompilation_after: see :class:`Strategy`.
    """

    strategy_name = "ddp"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Any = None,
        ddp_comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        start_method: str = "popen",
        no_recompilation_after: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.no_recompilation_after = no_recompilation_after
        refuse(
            type(self).__name__,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
        )
        refuse_start_method(type(self).__name__, start_method, ("popen", "spawn"))
        self.timeout_s = (timeout or TIMEOUT).total_seconds()
        tell_tuning(type(self).__name__, kwargs, process_group_backend)

    @property
    def is_distributed(self) -> bool:
        return True

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        for name in ("ddp", "ddp_notebook"):
            strategy_registry.register(name, cls, description=cls.__name__, override=True)
            for value in (True, False):
                strategy_registry.register(
                    f"{name}_find_unused_parameters_{str(value).lower()}",
                    cls,
                    description="XLA skips parameters without a gradient either way",
                    override=True,
                )


def refuse_start_method(owner: str, start_method: str, offered: tuple[str, ...]) -> None:
    """Raise for a way of starting processes that is not ``offered``."""
    if start_method not in offered:
        raise MisconfigurationException(
            f"{owner}(start_method={start_method!r}) is not supported: JAX does not survive a fork; use 'spawn' "
            "(Trainer(strategy='ddp_spawn')), or start the processes with `xlatrain launch`"
        )


def tell_tuning(owner: str, kwargs: Mapping[str, Any], process_group_backend: str | None) -> None:
    """Say that arguments for torch's process groups tune nothing here.

    Raises:
        TypeError: an argument that nobody knows.
    """
    if unknown := sorted(set(kwargs) - set(_PERFORMANCE_ONLY)):
        raise TypeError(f"{owner}() got unexpected arguments {unknown}")
    if unused := [*kwargs, *(["process_group_backend"] if process_group_backend else [])]:
        rank_zero_info(
            f"{owner}: {', '.join(sorted(unused))} tune torch's process groups; XLA's collectives have no such setting"
        )


_INSTEAD = {
    "ddp_comm_hook": "XLA chooses and compiles the collectives",
    "ddp_comm_state": "XLA chooses and compiles the collectives",
    "ddp_comm_wrapper": "XLA chooses and compiles the collectives",
    "model_averaging_period": "post-local SGD is not offered",
    "cpu_offload": "parameters stay on the devices; offload='optimizer' keeps the optimizer's state in host memory, "
    "offload_activations=['…layers.*'] what layers save for the backward pass",
    "mixed_precision": "set Trainer(precision='bf16-mixed')",
    "param_init_fn": "modules that configure_model makes get the values of their own constructors, on their shards",
}


def refuse(owner: str, **arguments: Any) -> None:
    """Raise for the first argument that was given (is not None)."""
    for name, value in arguments.items():
        if value is not None:
            raise MisconfigurationException(f"{owner}({name}=…) is not supported on an XLA mesh: {_INSTEAD[name]}")
