"""What a strategy tells about where a module's state lies, when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_compat.functional.model_state import ModelState
from torch_compat.utilities.rank_zero import rank_zero_only, rank_zero_warn
from xlatrain.sharding import ShardingTable, save_table

if TYPE_CHECKING:
    from torch_compat.strategies.strategy import Strategy


def table_of(strategy: Strategy, model: ModelState) -> ShardingTable:
    """What lies where of a placed module."""
    state = model.state
    rules = strategy.sharding_rules(model.module)
    return ShardingTable.of(rules, model.mesh, state.params, dict(state.opt_state), state.buffers)


def report_shardings(strategy: Strategy, model: ModelState) -> None:
    """Warn of rules that match nothing, and show the table as :attr:`Strategy.show_shardings` says."""
    unmatched = strategy.rules.unmatched(model.params)
    if unmatched:
        rank_zero_warn(f"{type(strategy).__name__}: {'; '.join(unmatched)}. `xlatrain shardings` shows what lies where")
    if strategy.show_shardings:
        _show(table_of(strategy, model), strategy.show_shardings)


@rank_zero_only
def _show(table: ShardingTable, where: object) -> None:
    if where is True:
        print(table)
    else:
        save_table(table, str(where))
