"""The report of a strategy about where a module's state lies, when a run begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch_compat.step.model_state import ModelState
from torch_compat.utilities.rank_zero import rank_zero_only, rank_zero_warn
from xlatrain.mesh.sharding import ShardingTable, idle_axes, save_table, slow_axes

if TYPE_CHECKING:
    from torch_compat.strategies.strategy import Strategy


def table_of(strategy: Strategy, model: ModelState) -> ShardingTable:
    """The sharding table of a placed module."""
    state = model.state
    rules = strategy.sharding_rules(model.module)
    return ShardingTable.from_rules(rules, model.mesh, state.params, dict(state.opt_state), state.buffers)


def report_shardings(strategy: Strategy, model: ModelState) -> None:
    """Warn of rules or axes that match or split nothing and of slow axes; show the table as ``Strategy.show_shardings`` says."""
    found = strategy.rules.unmatched(model.params)
    specs = [sharding.spec for sharding in model.param_shardings.values()]
    found += [idle for axis, idle in idle_axes(specs, model.mesh).items() if axis != "fsdp"]
    if isinstance(getattr(strategy, "tensor_parallel_plan", None), Mapping) and "tensor" not in model.mesh.shape:
        found.append(f"tensor_parallel_plan splits nothing: the mesh has no axis 'tensor'; its axes are {dict(model.mesh.shape)}")
    found += slow_axes(model.mesh)
    if found:
        rank_zero_warn(f"{type(strategy).__name__}: {'; '.join(found)}. `xlatrain shardings` shows what lies where")
    if strategy.show_shardings:
        _show(table_of(strategy, model), strategy.show_shardings)


@rank_zero_only
def _show(table: ShardingTable, where: object) -> None:
    if where is True:
        print(table)
    else:
        save_table(table, str(where))
