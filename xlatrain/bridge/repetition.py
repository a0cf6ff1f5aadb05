"""Find what repeats in a captured graph: the layers of a deep model, in its forward pass and again in its backward pass.

Two ops are alike when they differ only in *which* tensors of equal shape and dtype they use and in the number of a random draw.
A *run* is a stretch of the graph that is ``count`` times the same ``period`` ops. Whether the copies also use each other's
results in the same way is for :mod:`xlatrain.bridge.rolling` to see.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

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


class Kinds:
    """Tells which ops of a graph are alike."""

    def __init__(self) -> None:
        self._specs: dict[int, Hashable] = {}  # by id of a value, which its node keeps

    def numbers(self, nodes: Sequence[Node]) -> np.ndarray:
        """A number per op, equal for ops that are alike."""
        numbers: dict[Hashable, int] = {}
        return np.fromiter((numbers.setdefault(self.kind(node), len(numbers)) for node in nodes), np.int64, len(nodes))

    def kind(self, node: Node) -> Hashable:
        """What ops that are alike have in common."""
        words: list[Hashable] = [id(node.target), self._spec(node)]
        self._describe(node.args[:-1] if draws(node.target) else node.args, words)
        if node.kwargs:
            self._describe(node.kwargs, words)
        return tuple(words)

    def _describe(self, arg: Any, words: list[Hashable]) -> None:
        """Add to ``words`` what arguments have in common that are alike."""
        if isinstance(arg, Node):
            words.append(self._spec(arg))
        elif isinstance(arg, (list, tuple)):
            words.append(f"{len(arg)} of")
            for one in arg:
                self._describe(one, words)
        elif isinstance(arg, dict):
            words.append(f"{len(arg)} named")
            for name, one in arg.items():
                words.append(name)
                self._describe(one, words)
        else:
            words.append((type(arg), arg) if type(arg) in _LITERALS else repr(map_aggregate(arg, self._text)))

    def _text(self, arg: Any) -> str:
        return repr(self._spec(arg) if isinstance(arg, Node) else arg)

    def _spec(self, node: Node) -> Hashable:
        value = node.meta.get("val")
        known = self._specs.get(id(value))
        if known is None:
            values = value if isinstance(value, (list, tuple)) else [value]
            known = tuple((one.dtype, tuple(one.shape)) if isinstance(one, torch.Tensor) else type(one) for one in values)
            self._specs[id(value)] = known
        return known


_LITERALS = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


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
