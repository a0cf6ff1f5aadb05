"""Find what repeats in a captured graph: the layers of a deep model, in its forward pass and again in its backward pass.

Two ops are alike when they differ only in *which* tensors of equal shape and dtype they use and in the number of a random draw.
A *run* is a stretch of the graph that is ``count`` times the same ``period`` ops. Whether the copies also use each other's
results in the same way is for :mod:`xlatrain.bridge.loops.rolling` to see.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx.node import Node, map_aggregate

from xlatrain.bridge.graph_nodes import copied_from
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
        """The positions of the run in the graph, as a slice."""
        return slice(self.start, self.start + self.count * self.period + self.slack)

    @property
    def saved(self) -> int:
        """The number of ops that need not be lowered when one copy stands for all."""
        return (self.count - 1) * self.period


class Kinds:
    """Tells which ops of a graph are alike, by a number for each."""

    def __init__(self) -> None:
        self._specs: dict[int, Hashable] = {}  # by id of a value, which its node keeps
        self._copies: dict[int, int] = {}  # by id of what they were written down from, which they keep
        self._numbers: dict[Hashable, int] = {}

    def numbers(self, nodes: Iterable[Node]) -> np.ndarray:
        """The numbers of ops."""
        return np.fromiter(map(self.number, nodes), np.int64)

    def number(self, node: Node) -> int:
        """The number of an op."""
        copied = copied_from(node)
        if copied is None:
            return self._number(node.target, node.args, node.kwargs, node.meta.get("val"))
        known = self._copies.get(id(copied))
        if known is None:
            known = self._copies[id(copied)] = self._number(copied.target, copied.args, copied.kwargs, copied.value)
        return known

    def _number(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any) -> int:
        words: list[Hashable] = [id(target), self._spec(value)]
        self._describe(args[:-1] if draws(target) else args, words)
        if kwargs:
            self._describe(kwargs, words)
        return self._numbers.setdefault(tuple(words), len(self._numbers))

    def _describe(self, arg: Any, words: list[Hashable]) -> None:
        """Add to ``words`` what arguments have in common that are alike."""
        if isinstance(arg, Node):
            words.append(self._spec(arg.meta.get("val")))
        elif isinstance(arg, (list, tuple)):
            words.append(f"{len(arg)} of")
            for one in arg:
                self._describe(one, words)
        elif isinstance(arg, Mapping):
            words.append(f"{len(arg)} named")
            for name, one in arg.items():
                words.append(name)
                self._describe(one, words)
        else:
            words.append((type(arg), arg) if type(arg) in _LITERALS else repr(map_aggregate(arg, self._text)))

    def _text(self, arg: Any) -> str:
        return repr(self._spec(arg.meta.get("val")) if isinstance(arg, Node) else arg)

    def _spec(self, value: Any) -> Hashable:
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
