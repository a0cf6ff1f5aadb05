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


class DDPStrategy(ParallelStrategy):
    """Data parallelism: a ``data`` axis over every device of every process. API: ``lightning.pytorch.strategies.DDPStrategy``.

    ::

        trainer = pl.Trainer(accelerator="cpu", devices=8, strategy=DDPStrategy(no_recompilation_after=100))

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
        tell_tuning(type(self).__name__, process_group_backend, **kwargs)

    @property
    def is_distributed(self) -> bool:
        return True

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        # A notebook's processes are forked in stock, which JAX does not survive: here one drives all devices.
        register_ddp(strategy_registry, cls, {"ddp": "popen", "ddp_fork": "fork", "ddp_notebook": "popen"})


def register_ddp(registry: StrategyRegistryType, kind: type, start_methods: Mapping[str, str]) -> None:
    """Register ``kind`` under the names of ``start_methods``, and each with ``_find_unused_parameters_true`` and ``_false``."""
    for name, method in start_methods.items():
        description = f"DDP strategy with `start_method` {method!r}"
        registry.register(name, kind, description=description, override=True, start_method=method)
    for name, method in start_methods.items():
        for value in (False, True):
            registry.register(
                f"{name}_find_unused_parameters_{str(value).lower()}",
                kind,
                description=f"DDP strategy with `find_unused_parameters` as {value} and `start_method` {method!r}",
                override=True,
                find_unused_parameters=value,
                start_method=method,
            )


def refuse_start_method(owner: str, start_method: str, offered: tuple[str, ...]) -> None:
    """Raise for a way of starting processes that is not ``offered``."""
    if start_method not in offered:
        raise MisconfigurationException(
            f"{owner}(start_method={start_method!r}) is not supported: JAX does not survive a fork; use 'spawn' "
            "(Trainer(strategy='ddp_spawn')), or start the processes with `xlatrain launch`"
        )


def tell_tuning(
    owner: str,
    process_group_backend: str | None,
    *,
    dim: int | None = None,
    broadcast_buffers: bool | None = None,
    init_sync: bool | None = None,
    bucket_cap_mb: int | None = None,
    bucket_cap_mb_list: list[int] | None = None,
    find_unused_parameters: bool | None = None,
    check_reduction: bool | None = None,
    gradient_as_bucket_view: bool | None = None,
    static_graph: bool | None = None,
    delay_all_reduce_named_params: list[Any] | None = None,
    skip_all_reduce_unused_params: bool | None = None,
    **unknown: Any,
) -> None:
    """Say that arguments for torch's process groups tune nothing here. A command line finds their names in this signature.

    Raises:
        TypeError: an argument that nobody knows.
    """
    given = {name: value for name, value in locals().items() if name not in ("owner", "unknown") and value is not None}
    if unknown:
        raise TypeError(f"{owner}() got unexpected arguments {sorted(unknown)}")
    if unused := sorted(given):
        rank_zero_info(f"{owner}: {', '.join(unused)} tune torch's process groups; XLA's collectives have no such setting")


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
