"""A mesh with axes of the user's choice."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jax.sharding import PartitionSpec

from torch_compat.strategies.parallel import ParallelStrategy
from torch_compat.strategies.recomputation import globs
from torch_compat.utilities.registry import StrategyRegistryType
from xlatrain.bridge.capture.traceable.transformers_experts import expert_splits
from xlatrain.bridge.tensor_parallel import own_plan, planned_splits
from xlatrain.mesh.mesh import AXES
from xlatrain.mesh.pipelining import check_pipeline
from xlatrain.mesh.sharding import ShardingRules, check_ending, pairs_of


class MeshStrategy(ParallelStrategy):
    """A strategy for any mesh: ``MeshStrategy({"data": 2, "fsdp": 2, "tensor": 2})``.

    By name (``strategy="mesh"``) parameters are split over the devices of a process (``fsdp``) and replicated over processes
    (``data``), so that gathers stay inside a host. What comes first where several rules match a parameter is said in
    :class:`~xlatrain.mesh.sharding.ShardingRules`: ``rules``, ``logical_axes``, the plan, the automatic rule.

    ::

        strategy = MeshStrategy({"data": 2, "fsdp": 4}, rules=[("*.embedding.weight", PartitionSpec("fsdp"))])
        trainer = pl.Trainer(accelerator="cpu", devices=8, strategy=strategy)

    Args:
        axes: axis name → size; one may be -1 (what is left).
        rules: pairs of a glob over parameter paths and a ``PartitionSpec``, or a dict of them.
        logical_axes: pairs of a glob over parameter paths and a name, or None, for each dim; or a dict of them.
        axis_rules: logical name → mesh axis, axes, or None.
        tensor_parallel_plan: how ``tensor`` splits weights. ``"auto"``: as the ``transformers`` models in the module say
            themselves; a dict from module paths to styles (names, or torch's ``ColwiseParallel()``, ``RowwiseParallel()``,
            ``SequenceParallel()``) instead of that; None: only as the rules say.
        min_size: elements below which a parameter is not split over ``fsdp`` unless a rule says so.
        microbatches: into how many parts a pipeline over ``stage`` cuts the rows of a batch; None: as many as the rows allow,
            at most 8 for each stage.
        rounds: how often a microbatch comes to each stage. With more rounds stages wait less, and send more.
        indivisible: what becomes of a dim that the axes of a rule do not divide: ``"error"``, or ``"replicate"``: it stays whole.
        remat: globs over module paths (``"model.layers.*"``): what these modules compute is computed again in the backward pass,
            not kept, as with ``torch.utils.checkpoint``.
        offload_activations: globs over module paths: what these modules save for the backward pass lies in the memory of the host
            until then, as under ``torch.autograd.graph.save_on_cpu``. Of modules that ``remat`` names too these are their inputs.
        offload: ``"optimizer"``: the optimizer's state lies in the memory of the host, and is on the devices a parameter at a
            time while it is updated. For optimizers of ``torch.optim`` and automatic optimization.
        show_shardings: print what lies where when a run begins; a path that ends in ``.svg`` or ``.json``: write it there.
        no_recompilation_after: see :class:`Strategy`.

    Raises:
        ValueError: an unknown axis or logical name. When a run begins: a dim that does not divide, or a plan, ``remat`` or
            ``offload_activations`` that matches nothing.
    """

    strategy_name = "mesh"

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        rules: Mapping[str, PartitionSpec] | Sequence[tuple[str, PartitionSpec]] = (),
        *,
        logical_axes: Mapping[str, tuple[str | None, ...]] | Sequence[tuple[str, tuple[str | None, ...]]] = (),
        axis_rules: Mapping[str, str | tuple[str, ...] | None] | None = None,
        tensor_parallel_plan: Mapping[str, Any] | Literal["auto"] | None = "auto",
        min_size: int = 1024,
        indivisible: Literal["error", "replicate"] = "error",
        microbatches: int | None = None,
        rounds: int = 1,
        remat: Sequence[str] = (),
        offload_activations: Sequence[str] = (),
        offload: Literal["optimizer"] | None = None,
        show_shardings: bool | str | os.PathLike[str] = False,
        no_recompilation_after: int | None = None,
    ) -> None:
        super().__init__()
        if axes is not None and not isinstance(axes, Mapping):
            raise ValueError(f"MeshStrategy: axes={axes!r}; expected a dict of sizes, e.g. {{'data': 2, 'fsdp': 4}}")
        if axes is not None and (unknown := sorted(set(axes) - set(AXES))):
            raise ValueError(f"MeshStrategy: unknown axes {unknown}; known axes: {', '.join(AXES)}")
        check_pipeline((axes or {}).get("stage", 1), rounds, microbatches)
        if isinstance(tensor_parallel_plan, str) and tensor_parallel_plan != "auto":
            raise ValueError(f"MeshStrategy: tensor_parallel_plan={tensor_parallel_plan!r}; expected 'auto', a dict, or None")
        self.axes = None if axes is None else dict(axes)
        self.rules = ShardingRules(
            by_path=pairs_of("rules", rules),
            min_size=min_size,
            logical_axes=pairs_of("logical_axes", logical_axes),
            axis_rules=dict(axis_rules or {}),
            indivisible=indivisible,
            offload=offload,
            rounds=rounds,
            microbatches=microbatches,
        )
        self.tensor_parallel_plan = tensor_parallel_plan
        if not isinstance(show_shardings, bool):
            check_ending(show_shardings)
        self.remat = globs("MeshStrategy: remat", remat)
        self.offload_activations = globs("MeshStrategy: offload_activations", offload_activations)
        self.show_shardings = show_shardings
        self.no_recompilation_after = no_recompilation_after

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        if self.axes is not None:
            return self.axes
        return {"data": n_processes, "fsdp": n_devices // n_processes}

    def sharding_rules(self, module: torch.nn.Module) -> ShardingRules:
        plan, planned = self.tensor_parallel_plan, {}
        if plan is not None and not (plan == "auto" and self.mesh.shape.get("tensor", 1) == 1):
            planned = own_plan(module) if isinstance(plan, str) else planned_splits(module, plan)
        return replace(self.rules, planned=expert_splits(module, self.mesh, planned))

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        strategy_registry.register("mesh", cls, description=cls.__name__, override=True)
