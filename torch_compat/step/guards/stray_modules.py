"""Modules that a step meets outside of the tree: what torch's own code reads of them, which has no notes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torch_compat.step.effects.snapshots import HOOKS
from torch_compat.step.guards.locations import Contents, Entry, Location
from torch_compat.step.values.marks import PLAIN
from torch_compat.utilities.metric_types import is_metric_or_collection


def places_of(module: torch.nn.Module) -> Iterator[Location]:
    """The places of a module and of those in it: tensors, children, plain attributes and hooks; metrics are guarded otherwise."""
    for path, one in module.named_modules():
        if is_metric_or_collection(one):
            continue
        held, name = vars(one), ".".join(filter(None, (type(module).__name__, path)))
        for part in ("_parameters", "_buffers", "_modules"):
            for key in held[part]:
                yield Entry(held[part], key, f"{name}.{key}")
        yield Contents(held["_modules"], f"the modules in {name}")
        for key, value in held.items():
            if isinstance(value, PLAIN):
                yield Entry(held, key, f"{name}.{key}")
            elif key in HOOKS:
                yield Contents(value, f"the hooks of {name}")
