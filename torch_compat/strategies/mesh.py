"""A mesh with axes of the user's choice."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from torch_compat.strategies.parallel import ParallelStrategy
from torch_compat.utilities.registry import StrategyRegistryType
from xlatrain.mesh import AXES
from xlatrain.sharding import ShardingRules


class MeshStrategy(ParallelStrategy):
    """Any mesh: ``MeshStrategy({"data": 2, "fsdp": 4})``.

    By name (``strategy="mesh"``) parameters are split over the devices of a process (``fsdp``) and replicated over processes
    (``data``), so that gathers stay inside a host.

    Args:
        axes: axis name → size; one may be -1 (what is left).
        rules: pairs of a glob over parameter paths and a ``PartitionSpec``, which come before the automatic rule.
    """

    strategy_name = "mesh"

    def __init__(self, axes: Mapping[str, int] | None = None, rules: tuple[tuple[str, PartitionSpec], ...] = ()) -> None:
        super().__init__()
        self.rules = ShardingRules(by_path=tuple(rules))
        if axes is not None and (unknown := sorted(set(axes) - set(AXES))):
            raise ValueError(f"MeshStrategy: unknown axes {unknown}; known axes: {', '.join(AXES)}")
        self.axes = None if axes is None else dict(axes)

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        if self.axes is not None:
            return self.axes
        return {"data": n_processes, "fsdp": n_devices // n_processes}

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        strategy_registry.register("mesh", cls, description=cls.__name__, override=True)
