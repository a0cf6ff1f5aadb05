"""Find what repeats in a captured graph: the layers of a deep model, in its forward pass and again in its backward pass.

Two ops are alike when they differ only in *which* tensors of equal shape and dtype they use and in the number of a random draw.
A *run* is a stretch of the graph that is ``count`` times the same ``period`` ops. Whether the copies also use each other's
results in the same way is for :mod:`xlatrain.bridge.rolling` to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.fx.node import Node, map_aggregate

from xlatrain.bridge.random import draws


@dataclass(frozen=True)
class Run:
    """``count`` copies of ``period`` consecutive ops, from position ``start``; up to ``slack`` later starts are possible too."""

    start: int
    period: int
    count: int
    slack: int

    @property
    def stretch(self) -> slice:
        """All its positions."""
        return slice(self.start, self.start + self.count * self.period + self.slack)

    @property
    def saved(self) -> int:
        """Ops that need not be lowered when one copy stands for all."""
        return (self.count - 1) * self.period


def kinds(nodes: Sequence[Node]) -> np.ndarray:
    """A number per op, equal for ops that are alike; negative and unique for one that must stay as it is."""
    numbers: dict[Any, int] = {}
    found = np.empty(len(nodes), np.int64)
    for i, node in enumerate(nodes):
        found[i] = numbers.setdefault(kind(node), len(numbers))
    return found


def longest_run(kinds: np.ndarray, at_least: int) -> Run | None:
    """The run that saves the most ops, of at least ``at_least`` copies; None where nothing repeats so often."""
    best: Run | None = None
    for period in range(1, len(kinds) // at_least + 1):
        equal = kinds[:-period] == kinds[period:]
        least = max(best.saved if best else 0, (at_least - 1) * period - 1)
        if np.count_nonzero(equal) <= least:
            continue
        start, length = _longest_stretch(equal)
        count = length // period + 1
        if count >= at_least and (best is None or (count - 1) * period > best.saved):
            best = Run(start, period, count, length % period)
    return best


def _longest_stretch(equal: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], equal.view(np.int8), [0]])))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(starts[longest]), int(lengths[longest])


def kind(node: Node) -> Any:
    """What ops that are alike have in common."""
    args = node.args[:-1] if draws(node.target) else node.args
    return str(node.target), repr(map_aggregate(args, _literal)), repr(map_aggregate(node.kwargs, _literal)), _spec(node)


def _literal(arg: Any) -> Any:
    return _spec(arg) if isinstance(arg, Node) else repr(arg)


def _spec(node: Node) -> str:
    value = node.meta.get("val")
    one = value if isinstance(value, list | tuple) else [value]
    return "|".join(
        f"{cast(Any, v).dtype}{tuple(cast(Any, v).shape)}" if isinstance(v, torch.Tensor) else repr(type(v)) for v in one
    )
