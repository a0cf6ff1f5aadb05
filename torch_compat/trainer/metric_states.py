"""The states of the torchmetrics objects in a module, and what is made of several processes' states on another number of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from torch_compat.utilities.metric_types import is_metric
from torch_compat.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torchmetrics import Metric

States = dict[str, dict[str, Any]]


def states(module: Module, without: Collection[int] = ()) -> States:
    """The states of metrics that were updated since their last reset, by name in ``module``; ``without`` are ids of metrics."""
    return {
        name: {"count": metric._update_count, "values": {key: _copied(getattr(metric, key)) for key in metric._defaults}}
        for name, metric in _metrics(module)
        if metric._update_count and id(metric) not in without
    }


def load(module: Module, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the metrics these states; the others are reset.

    Raises:
        ValueError: a state that the metric of that name does not have.
    """
    for name, metric in _metrics(module):
        if name not in found:
            if metric._update_count:
                metric.reset()
            continue
        for key, value in found[name]["values"].items():
            if key not in metric._defaults:
                raise ValueError(
                    f"the checkpoint has a state {key!r} of the metric {name!r}, which {type(metric).__name__} has not"
                )
            current = metric._defaults[key]
            device = current.device if isinstance(current, torch.Tensor) else metric.device
            setattr(metric, key, [one.to(device) for one in value] if isinstance(value, list) else value.to(device))
        metric._update_count = found[name]["count"]
        metric._computed = None


def merged(module: Module, by_process: Sequence[States], process: int) -> States:
    """Merge states for another number of processes than saved them: what was counted anywhere is counted once.

    Process 0 takes the sum, the extreme or the concatenation; a mean is everybody's. A metric that reduces in another way begins
    anew, with a warning.
    """
    found: States = {}
    for name, metric in _metrics(module):
        parts = [states[name] for states in by_process if name in states]
        if not parts:
            continue
        values: dict[str, Any] = {}
        for key in metric._defaults:
            reduced = _reduced(metric._reductions[key], [part["values"][key] for part in parts])
            mean = getattr(metric._reductions[key], "__name__", "") == "dim_zero_mean"
            values[key] = reduced if process == 0 or mean else _copied(metric._defaults[key])
        if any(value is None for value in values.values()):
            rank_zero_warn(
                f"the metric {name!r} ({type(metric).__name__}) begins anew: on another number of processes than it was saved on "
                "only states that are reduced by sum, mean, min, max or concatenation can be continued."
            )
            continue
        found[name] = {"count": max(part["count"] for part in parts), "values": values}
    return found


def _metrics(module: Module) -> Iterator[tuple[str, Metric]]:
    return ((name, one) for name, one in module.named_modules() if is_metric(one))


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.detach().cpu().clone()


def _reduced(reduction: Any, values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    how = getattr(reduction, "__name__", "")
    if how == "dim_zero_cat":
        return torch.cat([torch.atleast_1d(value) for value in values])
    stacked = torch.stack(values)
    reduce = {"dim_zero_sum": torch.sum, "dim_zero_mean": torch.mean, "dim_zero_max": torch.amax, "dim_zero_min": torch.amin}
    return reduce[how](stacked, dim=0) if how in reduce else None
