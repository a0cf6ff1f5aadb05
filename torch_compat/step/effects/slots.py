"""Slots: placeholders in the results and effects of a captured step for values that differ from step to step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_compat.step.host.scalar_plan import HostValues


@dataclass(frozen=True)
class ResultTemplate:
    """The user's return value, with slots in place of its tensors, counters and parts of the batch."""

    tree: Any


@dataclass(frozen=True)
class OutputSlot:
    """A slot for the ``index``-th value of a captured step in what it returns or stores."""

    index: int


@dataclass(frozen=True)
class ScalarSlot:
    """A slot for the ``index``-th of the packed scalars, float32."""

    index: int


@dataclass(frozen=True)
class CounterPlace:
    """A slot for an expression over the loop's counters; ``text`` tells it from others."""

    expression: Callable[[HostValues], Any] = field(compare=False, repr=False)
    text: str


@dataclass(frozen=True)
class BatchPlace:
    """A slot for the ``index``-th leaf of the batch that is no tensor, or for the part of it that ``path`` leads to."""

    index: int
    path: tuple[Any, ...] = ()

    def find(self, others: Sequence[Any]) -> Any:
        return functools.reduce(lambda value, key: value[key], self.path, others[self.index])
