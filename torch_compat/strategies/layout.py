"""The layout of a run, as a plan of ``xlatrain preflight`` keeps it: mesh, sharding rules, recomputation, offload."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from torch_compat.strategies.mesh import MeshStrategy
from torch_compat.strategies.strategy import Strategy
from xlatrain.bridge.tensor_parallel import style_name


def layout_of(strategy: Strategy, mesh: Mapping[str, int]) -> dict[str, Any]:
    """The layout from which :func:`strategy_of` makes an equal strategy, in values of JSON.

    Args:
        mesh: axis name → size.
    """
    rules, plan = strategy.rules, getattr(strategy, "tensor_parallel_plan", None)
    return {
        "mesh": dict(mesh),
        "rules": [[pattern, [_axes(one) for one in spec]] for pattern, spec in rules.by_path],
        "logical_axes": [[pattern, list(names)] for pattern, names in rules.logical_axes],
        "axis_rules": {name: _axes(axes) for name, axes in rules.axis_rules.items()},
        "tensor_parallel_plan": {key: style_name(style) for key, style in plan.items()} if isinstance(plan, Mapping) else plan,
        "min_size": rules.min_size,
        "indivisible": rules.indivisible,
        "remat": list(strategy.remat),
        "offload_activations": list(strategy.offload_activations),
        "offload": rules.offload,
        "rounds": rules.rounds,
        "microbatches": rules.microbatches,
    }


def strategy_of(layout: Mapping[str, Any]) -> MeshStrategy:
    """The strategy of a layout."""
    staged = layout["mesh"].get("stage", 1) != 1  # a search tries meshes without
    return MeshStrategy(
        layout["mesh"],
        [(pattern, PartitionSpec(*map(_spec, spec))) for pattern, spec in layout["rules"]],
        logical_axes=[(pattern, tuple(names)) for pattern, names in layout["logical_axes"]],
        axis_rules={name: _spec(axes) for name, axes in layout["axis_rules"].items()},
        tensor_parallel_plan=layout["tensor_parallel_plan"],
        min_size=layout["min_size"],
        indivisible=layout["indivisible"],
        remat=layout["remat"],
        offload_activations=layout.get("offload_activations", ()),  # plans of older versions have none
        offload=layout.get("offload"),
        rounds=layout.get("rounds", 1) if staged else 1,
        microbatches=layout.get("microbatches") if staged else None,
    )


def planned_strategy() -> Strategy | None:
    """The strategy that the plan named by ``XLATRAIN_PLAN`` takes for ``strategy="auto"``; None without a plan.

    Raises:
        PlanError: the file is missing, or no plan.
    """
    path = os.environ.get("XLATRAIN_PLAN")
    if not path:
        return None
    from xlatrain.preflight.plan import PlanError, read_plan

    layout = read_plan(path)["settings"].get("layout")
    if layout is None:
        raise PlanError(
            f"XLATRAIN_PLAN={path}: a plan of an older version, without the mesh's rules; run `xlatrain preflight` again"
        )
    return strategy_of(layout)


def _axes(axes: Any) -> str | list[str] | None:
    return list(axes) if isinstance(axes, tuple) else axes


def _spec(axes: Any) -> Any:
    return tuple(axes) if isinstance(axes, list) else axes
