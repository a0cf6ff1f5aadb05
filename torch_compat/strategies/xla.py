"""torch-xla, on one device or on many."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jax.sharding import PartitionSpec

from torch_compat.device_backends import DeviceBackend
from torch_compat.device_backends.torch_xla import TorchXLA
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.strategies.on_device import DeviceStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_collectives import OneDeviceCollectives
from torch_compat.utilities.registry import StrategyRegistryType
from xlatrain.mesh.mesh import AXES
from xlatrain.mesh.sharding import ShardingRules, pairs_of

_DEBUG = "PT_XLA_DEBUG"


class XLAStrategy(DeviceStrategy):
    """User code on lazy tensors of torch-xla, over all devices by SPMD. API: ``lightning.pytorch.strategies.XLAStrategy``.

    Lightning's class of this name runs a process for each device, with a replica each; this one has a process for each host, and
    one global batch, as every strategy here. With torch_xla installed only (the extra ``torch-xla``, docs/pods.md).

    Args:
        debug: have torch-xla explain each compilation (``PT_XLA_DEBUG=1``).
        sync_module_states: parameters are process 0's on every process; cannot be switched off.
        axes: mesh axis name → size, one may be -1; None: all devices in ``data``.
        rules: pairs of a glob over parameter paths and a ``PartitionSpec``, see :class:`~xlatrain.mesh.sharding.ShardingRules`.
        min_size: elements below which a parameter is not split over ``fsdp`` unless a rule says so.

    Raises:
        MisconfigurationException: when a Trainer takes it: torch_xla is missing, or was built for another torch.
        ValueError: an unknown axis.
    """

    strategy_name = "torch_xla"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
        sync_module_states: bool = True,
        *,
        axes: Mapping[str, int] | None = None,
        rules: Sequence[tuple[str, PartitionSpec]] = (),
        min_size: int = 1024,
        cluster_environment: Any = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        if not sync_module_states:
            raise MisconfigurationException(
                f"{type(self).__name__}(sync_module_states=False) is not supported: a parameter is one global tensor, "
                "with process 0's values; leave it out"
            )
        if axes is not None and (unknown := sorted(set(axes) - set(AXES))):
            raise ValueError(f"{type(self).__name__}: unknown axes {unknown}; known axes: {', '.join(AXES)}")
        if axes is not None and axes.get("stage", 1) != 1:
            raise ValueError(
                f"{type(self).__name__}: axes={dict(axes)}: torch-xla runs no pipeline, so that 'stage' splits nothing; give its "
                "devices to 'data' or 'fsdp'"
            )
        self.axes = None if axes is None else dict(axes)
        self.rules = ShardingRules(by_path=pairs_of("rules", rules), min_size=min_size)
        self.debug = debug

    def make_backend(self, platform: str | None, devices: int | None) -> DeviceBackend:
        return TorchXLA(f"strategy={self.strategy_name!r}", platform, devices)

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        return {"data": n_devices} if self.axes is None else self.axes

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.debug:
            os.environ[_DEBUG] = "1"

    def teardown(self) -> None:
        super().teardown()
        if self.debug:
            os.environ.pop(_DEBUG, None)

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        for name in ("torch_xla", "xla"):
            strategy_registry.register(name, cls, description=cls.__name__, override=True)
        strategy_registry.register("xla_debug", cls, description="XLA strategy with `debug` as True", override=True, debug=True)


class SingleDeviceXLAStrategy(OneDeviceCollectives, XLAStrategy):
    """User code on lazy tensors of torch-xla, on one device. API: ``lightning.pytorch.strategies.SingleDeviceXLAStrategy``.

    Args:
        device: 0 or ``xla:0``: the first device; torch-xla's environment variables say which one that is.
        debug: see :class:`XLAStrategy`.
    """

    strategy_name = "single_xla"

    def __init__(
        self,
        device: torch.device | str | int = 0,
        accelerator: Any = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__(accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin, debug=debug)
        chosen = torch.device("xla", device) if isinstance(device, int) else torch.device(device)
        if chosen.type != "xla" or chosen.index not in (None, 0):
            raise MisconfigurationException(
                f"{type(self).__name__}(device={device!r}): expected 0; choose the chip with TPU_VISIBLE_CHIPS, before the "
                "program starts"
            )

    def make_backend(self, platform: str | None, devices: int | None) -> DeviceBackend:
        if devices not in (None, 1):
            raise MisconfigurationException(
                f"strategy='single_xla' with {devices} devices; set devices=1 or strategy='torch_xla'"
            )
        return super().make_backend(platform, 1)

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        strategy_registry.register("single_xla", cls, description=cls.__name__, override=True)
