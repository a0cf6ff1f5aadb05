"""The param groups of an optimizer as a step's Python sees them, without their numbers, which are inputs of the step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from torch_compat.step.guards.locations import Location
from torch_compat.step.values.marks import mark


class ParamGroups(Location):
    """``optimizer.param_groups``: how many groups there are, which entries they have, and what is in those that are no numbers.

    What the step itself writes there is found by :mod:`~torch_compat.step.optimizers.traced`.
    """

    kind = "param groups"

    def __init__(self, owner: torch.optim.Optimizer) -> None:
        super().__init__(owner, f"param_groups of {type(owner).__name__}")

    def now(self) -> Hashable:
        return tuple(_mark_of(group) for group in self.owner.param_groups)


def _mark_of(group: Mapping[str, Any]) -> Hashable:
    return tuple((key, len(value) if key == "params" else _option(value)) for key, value in group.items())


def _option(value: Any) -> Hashable:
    """The mark of an option; of numbers, alone or in a tuple or list, only their types."""
    if isinstance(value, torch.Tensor):
        return float  # by which it is read
    kind = value.__class__  # of a stand-in, that of its number
    if kind in (tuple, list) and all(one.__class__ in (int, float) for one in value):
        return kind, tuple(one.__class__ for one in value)
    return kind if kind in (int, float) else mark(value)
