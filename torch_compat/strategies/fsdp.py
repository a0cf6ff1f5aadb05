"""Fully sharded data parallelism: parameters, gradients and optimizer state are split too."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch

from torch_compat.plugins.precision import Precision
from torch_compat.strategies.ddp import TIMEOUT, refuse
from torch_compat.strategies.parallel import ParallelStrategy
from torch_compat.strategies.recomputation import globs, modules_of_policy
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info
from torch_compat.utilities.registry import StrategyRegistryType
from xlatrain.mesh.sharding import ShardingRules

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
_TUNING = (
    "backward_prefetch", "device_id", "forward_prefetch", "ignored_modules", "ignored_states", "limit_all_gathers",
    "process_group", "sync_module_states", "use_orig_params",
)  # fmt: skip


class FSDPStrategy(ParallelStrategy):
    """A mesh of ``data`` × ``fsdp``. API: ``lightning.pytorch.strategies.FSDPStrategy``.

    ::

        strategy = FSDPStrategy(activation_checkpointing_policy={torch.nn.TransformerEncoderLayer})
        trainer = pl.Trainer(accelerator="cpu", devices=8, strategy=strategy)

    Each parameter is split by itself (along its largest dim that the axis divides), so there is nothing to wrap: wrapping
    policies change no number and are accepted with a notice. XLA gathers a parameter where it is used and scatters its gradient.
    ``cpu_offload`` and ``mixed_precision`` are refused; ``offload="optimizer"`` and ``offload_activations`` are
    what there is of the former.

    Args:
        activation_checkpointing_policy: modules whose activations are computed again in the backward pass: a set of classes, or
            a policy of ``torch.distributed.fsdp.wrap``, as for wrapping.
        activation_checkpointing: the older name: a class or a list of classes.
        sharding_strategy: ``FULL_SHARD`` and ``SHARD_GRAD_OP`` split over all devices, ``HYBRID_SHARD`` over ``fsdp`` of
            ``device_mesh`` and replicates over ``data`` (without a mesh, but with an ``auto_wrap_policy``: over the devices of
            each process, as torch does), ``NO_SHARD`` replicates everything.
        device_mesh: ``(data, fsdp)`` sizes.
        state_dict_type: both kinds are saved the same way, shard by shard, and restore onto any mesh.
        offload_activations: see :class:`~torch_compat.strategies.MeshStrategy`. Stock has no such argument.
        offload: ``"optimizer"``: see :class:`~torch_compat.strategies.MeshStrategy`. Stock has no such argument.
        no_recompilation_after: see :class:`Strategy`.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = TIMEOUT,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: Literal["full", "sharded"] = "full",
        device_mesh: Sequence[int] | None = None,
        offload_activations: Sequence[str] = (),
        offload: Literal["optimizer"] | None = None,
        no_recompilation_after: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.no_recompilation_after = no_recompilation_after
        self.rules = ShardingRules(min_size=1, offload=offload)
        self.offload_activations = globs("FSDPStrategy: offload_activations", offload_activations)
        self.timeout_s = (timeout or TIMEOUT).total_seconds()
        refuse(
            type(self).__name__,
            cpu_offload=getattr(cpu_offload, "offload_params", cpu_offload) or None,  # torch's CPUOffload() offloads nothing
            mixed_precision=mixed_precision,
            param_init_fn=kwargs.pop("param_init_fn", None),
        )
        if unknown := sorted(set(kwargs) - set(_TUNING)):
            raise TypeError(f"{type(self).__name__}() got unexpected arguments {unknown}")
        if activation_checkpointing is not None and activation_checkpointing_policy is not None:
            raise ValueError(
                f"{type(self).__name__}: activation_checkpointing and activation_checkpointing_policy mean the same; give one"
            )
        self._recomputed = activation_checkpointing_policy if activation_checkpointing is None else activation_checkpointing
        if isinstance(self._recomputed, type):
            self._recomputed = [self._recomputed]
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"state_dict_type={state_dict_type!r}; expected 'full' or 'sharded'")
        self.sharding_strategy = getattr(sharding_strategy, "name", sharding_strategy)
        if self.sharding_strategy not in _SHARDING:
            raise ValueError(f"sharding_strategy={sharding_strategy!r}; expected one of {', '.join(_SHARDING)}")
        if self.sharding_strategy == "HYBRID_SHARD" and device_mesh is None and auto_wrap_policy is None:
            raise MisconfigurationException(
                "The hybrid sharding strategy requires you to pass at least one of the parameters: `auto_wrap_policy` (shards "
                "over the devices of each process) or `device_mesh`: (data, fsdp), e.g. (2, 4) on 8 devices"
            )
        if device_mesh is not None and not (isinstance(device_mesh, Sequence) and len(device_mesh) == 2):
            raise ValueError(f"device_mesh={device_mesh!r}; expected two sizes, (data, fsdp): there is no torch DeviceMesh here")
        self.device_mesh = None if device_mesh is None else (int(device_mesh[0]), int(device_mesh[1]))
        tuning = {"auto_wrap_policy": auto_wrap_policy, "process_group_backend": process_group_backend, **kwargs}
        if unused := sorted(name for name, value in tuning.items() if value is not None):
            rank_zero_info(
                f"{type(self).__name__}: {', '.join(unused)} tune torch's FSDP wrapping; here each parameter is split by itself"
            )

    def recomputed_modules(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        own = super().recomputed_modules(module)
        return own if self._recomputed is None else [*own, *modules_of_policy(module, self._recomputed)]

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        if self.sharding_strategy == "NO_SHARD":
            return {"data": n_devices}
        if self.device_mesh is not None:
            return {"data": self.device_mesh[0], "fsdp": self.device_mesh[1]}
        if self.sharding_strategy == "HYBRID_SHARD":  # torch's default: parameters are whole on each host, split inside of it
            return {"data": n_processes, "fsdp": n_devices // n_processes}
        return {"data": 1, "fsdp": n_devices}

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        register_fsdp(strategy_registry, cls)


def register_fsdp(registry: StrategyRegistryType, kind: type) -> None:
    """Register ``kind`` under stock's names; that with ``cpu_offload`` raises when it is made."""
    sharded = "Fully Sharded Data Parallel (FSDP) training"
    registry.register("fsdp", kind, description=sharded, override=True)
    offloading = f"{sharded} with Full Sharding and CPU Offloading"
    registry.register("fsdp_cpu_offload", kind, description=offloading, override=True, cpu_offload=True)
