"""Names of optimizers and parameter groups, as ``LearningRateMonitor`` logs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_compat.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from torch.optim import Optimizer


class NamedOptimizer(NamedTuple):
    """An optimizer with one name per parameter group; ``interval`` is "step" or "epoch" of its scheduler, None without one."""

    optimizer: Optimizer
    group_names: list[str]
    interval: str | None


def check_rates(who: str, optimizers: Sequence[Optimizer]) -> None:
    """Check that every param group has a learning rate: those of optax have one where it is injected.

    Args:
        who: the callback that reads or sets it.

    Raises:
        MisconfigurationException: with the optimizer's own words.
    """
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        try:
            group["lr"]
        except KeyError as error:
            raise MisconfigurationException(f"{who} needs a learning rate. {error.args[0]}") from error


def name_optimizers(configs: Sequence[Any], optimizers: Sequence[Optimizer]) -> list[NamedOptimizer]:
    """Name the optimizer of every scheduler, then the optimizers without a scheduler.

    The name is the scheduler's, or ``lr-<class>``, then ``lr-<class>-1``, ... for more of the same class; ``/<name of the
    group>`` or ``/pg1``, ``/pg2``, ... follows if there are several groups, or if the only group has a name.

    Args:
        configs: ``trainer.lr_scheduler_configs``.
        optimizers: ``trainer.optimizers``.

    Raises:
        MisconfigurationException: two groups of one optimizer have the same name.
    """
    named: list[NamedOptimizer] = []
    seen: Counter[type] = Counter()

    def add(optimizer: Optimizer, name: str | None, interval: str | None) -> None:
        kind = type(optimizer)
        if name is None:
            seen[kind] += 1
        base = name if name is not None else f"lr-{kind.__name__}"
        if seen[kind] > 1:
            base += f"-{seen[kind] - 1}"
        named.append(NamedOptimizer(optimizer, _group_names(optimizer, base), interval))

    for config in configs:
        add(config.scheduler.optimizer, config.name, config.interval)
    scheduled = {id(entry.optimizer) for entry in named}
    for optimizer in optimizers:
        if id(optimizer) not in scheduled:
            add(optimizer, None, None)
    return named


def _group_names(optimizer: Optimizer, base: str) -> list[str]:
    groups = optimizer.param_groups
    names = [group.get("name", f"pg{index}") for index, group in enumerate(groups, start=1)]
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise MisconfigurationException(
            f"A single `Optimizer` cannot have multiple parameter groups of one `name`: {base} has duplicated parameter group "
            f"names {set(duplicates)}"
        )
    if len(groups) == 1 and not groups[0].get("name"):
        return [base]
    return [f"{base}/{name}" for name in names]
