"""torch-xla with parameters, gradients and optimizer state split over the devices."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jax.sharding import PartitionSpec

from torch_compat.device_backends.torch_xla import TorchXLA
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies.xla import XLAStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.registry import StrategyRegistryType
from xlatrain.mesh.mesh import batch_axes, data_parallel_size

WrapPolicy = Callable[[torch.nn.Module, bool, int], bool]
"""``(module, recurse, its elements) -> whether it is wrapped``, as in ``torch.distributed.fsdp``."""


class XLAFSDPStrategy(XLAStrategy):
    """torch-xla's FSDPv2 (``SpmdFullyShardedDataParallel``). API: ``lightning.fabric.strategies.XLAFSDPStrategy``.

    Parameters lie as the sharding rules say, like those of :class:`~torch_compat.strategies.fsdp.FSDPStrategy`. Modules that are
    wrapped have their outputs split as batches are, so that XLA gathers the weights and not the activations, and barriers in
    their backward pass, so that gradients are reduced one module after the other. They keep their names and places.

    Args:
        auto_wrap_policy: classes of the modules to wrap, or a function that says of each; None: the members of every
            ``ModuleList`` (the blocks of a transformer).
        state_dict_type: both kinds are saved the same way, shard by shard, and restore onto any mesh.
        axes: mesh axis name → size, ``fsdp`` among them; None: all devices in ``fsdp``.
        rules, min_size: see :class:`XLAStrategy`.
    """

    strategy_name = "xla_fsdp"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        auto_wrap_policy: Collection[type[torch.nn.Module]] | WrapPolicy | None = None,
        activation_checkpointing_policy: Any = None,
        state_dict_type: Literal["full", "sharded"] = "sharded",
        sequential_save: bool = False,
        *,
        debug: bool = False,
        axes: Mapping[str, int] | None = None,
        rules: Sequence[tuple[str, PartitionSpec]] = (),
        min_size: int = 1,
        cluster_environment: Any = None,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            checkpoint_io,
            precision_plugin,
            debug,
            axes=axes,
            rules=rules,
            min_size=min_size,
            cluster_environment=cluster_environment,
        )
        if activation_checkpointing_policy is not None:
            raise MisconfigurationException(
                "XLAFSDPStrategy(activation_checkpointing_policy=…) is not supported: it would rename the modules; call "
                "torch_xla.utils.checkpoint.checkpoint in their forward, or use FSDPStrategy and MeshStrategy(remat=[…])"
            )
        if sequential_save:
            raise MisconfigurationException(
                "XLAFSDPStrategy(sequential_save=True) is not supported: each process saves its own shards, and no other's; "
                "leave it out"
            )
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"state_dict_type={state_dict_type!r}; expected 'full' or 'sharded'")
        if axes is not None and "fsdp" not in axes:
            raise ValueError(f"XLAFSDPStrategy(axes={dict(axes)}): expected an axis 'fsdp', over which parameters are split")
        self.auto_wrap_policy = auto_wrap_policy
        self._undo: list[Callable[[], Any]] = []

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        return {"data": 1, "fsdp": n_devices} if self.axes is None else self.axes

    def module_placed(self, module: torch.nn.Module) -> None:
        assert isinstance(self.backend, TorchXLA)
        if self.backend.mesh is None:
            return
        fsdp = importlib.import_module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
        spmd = importlib.import_module("torch_xla.distributed.spmd")
        axes, parts = batch_axes(self.mesh), data_parallel_size(self.mesh)

        def split_rows(output: Any, mesh: Any) -> None:
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[0] % parts == 0:
                    spmd.mark_sharding(tensor, mesh, (axes, *[None] * (tensor.ndim - 1)))

        for child in self._wrapped(module):
            before = set(child._backward_hooks)
            fsdp.SpmdFullyShardedDataParallel(child, mesh=self.backend.mesh, shard_output=split_rows)
            self._undo += [partial(child._backward_hooks.pop, key) for key in child._backward_hooks.keys() - before]
            self._undo.append(child.register_forward_hook(_sharding_outputs(split_rows, self.backend.mesh)).remove)

    def module_released(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _wrapped(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules to wrap, inner ones first.

        Raises:
            ValueError: the policy matches none.
        """
        policy = self.auto_wrap_policy
        inner = [child for child in module.modules() if child is not module and any(True for _ in child.parameters())]
        if policy is None:
            blocks = {id(block) for parent in module.modules() if isinstance(parent, torch.nn.ModuleList) for block in parent}
            found = [child for child in inner if id(child) in blocks]
        elif callable(policy):
            found = [child for child in inner if policy(child, False, sum(p.numel() for p in child.parameters()))]
        else:
            kinds = tuple(policy)
            found = [child for child in inner if isinstance(child, kinds)]
        if policy is not None and not found:
            raise ValueError(f"XLAFSDPStrategy(auto_wrap_policy={policy!r}) matches no module of {type(module).__name__}")
        return found[::-1]

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        strategy_registry.register("xla_fsdp", cls, description=cls.__name__, override=True)


def _sharding_outputs(split: Callable[[Any, Any], None], mesh: Any) -> Callable[..., None]:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        split(output, mesh)

    return hook
