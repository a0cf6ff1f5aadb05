"""Graphs of one function for inputs of several sizes as one graph: which of its sizes and numbers change with them.

Nothing is concluded from one size about another. A function is captured for each size; where its graph is that for larger inputs
but for whole numbers and fractions, these are what a program for the larger inputs must be told to compute what this one does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch.fx.node import Node

from xlatrain.bridge.capture.capture import Capture

_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class GraphNumbers:
    """A graph as its numbers and all else.

    Attributes:
        rest: ops, dtypes, how they hang together: everything that is no number.
        numbers: sizes of tensors and arguments of ops, in the order of the graph.
        is_size: for each number whether it is a size of a tensor.
    """

    rest: Hashable
    numbers: tuple[int | float, ...]
    is_size: tuple[bool, ...]

    @classmethod
    def of(cls, capture: Capture) -> GraphNumbers:
        places: dict[Node, int] = {}
        rest: list[Hashable] = []
        numbers: list[int | float] = []
        is_size: list[bool] = []
        for node in capture.graph.graph.nodes:
            places[node] = len(places)
            target = node.target if node.op == "call_function" else node.op
            for dims in sizes_of(node):
                rest.append(len(dims))
                numbers += dims
                is_size += [True] * len(dims)
            leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
            rest += [str(target), structure, *(one.dtype for one in _tensors(node))]
            for leaf in leaves:
                if _is_number(leaf):
                    numbers.append(leaf)
                    is_size.append(False)
                    rest.append(type(leaf))
                else:
                    rest.append(("node", places[leaf]) if isinstance(leaf, Node) else repr(leaf))
        drawn = capture.host_draws and tuple((number, draw.method) for number, draw in capture.host_draws.draws.items())
        facts = (repr(capture.result), capture.uses_random, drawn, tuple(capture.constants))
        return cls((*facts, *rest), tuple(numbers), tuple(is_size))


class Changing(NamedTuple):
    """A size or number that changes: the ``index``-th of the whole numbers, or of the fractions."""

    index: int
    whole: bool


@dataclass(frozen=True)
class Bounds:
    """The sizes and numbers that change in a graph, whose own sizes are bounds of the true ones.

    Attributes:
        sizes: op → for each tensor that it gives, for each dim what changes of it; None: nothing.
        arguments: op → the same for the leaves of ``(args, kwargs)``.
        positions: for each of the numbers that change together, where it is in the graph.
        padded: the graph's numbers.
    """

    sizes: dict[Node, tuple[tuple[Changing | None, ...], ...]]
    arguments: dict[Node, tuple[Changing | None, ...]]
    positions: dict[Changing, list[int]]
    padded: GraphNumbers

    @classmethod
    def of(cls, capture: Capture, samples: Sequence[GraphNumbers]) -> Bounds | None:
        """The bounds of a graph for inputs larger than those of ``samples``; None where it is another graph than theirs."""
        padded = GraphNumbers.of(capture)
        if any((one.rest, len(one.numbers)) != (padded.rest, len(padded.numbers)) for one in samples):
            return None
        together: dict[Hashable, Changing] = {}
        counts = {True: 0, False: 0}
        positions: dict[Changing, list[int]] = {}
        found: list[Changing | None] = []
        for position, numbers in enumerate(zip(padded.numbers, *(one.numbers for one in samples), strict=True)):
            if len(set(map(repr, numbers))) == 1:
                found.append(None)
                continue
            whole = isinstance(numbers[0], int)
            key = (whole, *map(repr, numbers))
            if key not in together:
                together[key] = Changing(counts[whole], whole)
                counts[whole] += 1
            found.append(together[key])
            positions.setdefault(together[key], []).append(position)
        given = iter(found)
        sizes, arguments = {}, {}
        for node in capture.graph.graph.nodes:
            sizes[node] = tuple(tuple(next(given) for _ in dims) for dims in sizes_of(node))
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            arguments[node] = tuple(next(given) if _is_number(leaf) else None for leaf in leaves)
        bounds = cls(sizes, arguments, positions, padded)
        return bounds if all(bounds.values(one) is not None for one in samples) else None

    def values(self, sample: GraphNumbers) -> tuple[list[int], list[float]] | None:
        """The whole numbers and the fractions with which the graph computes what another does; None where no numbers do so.

        No size stands for 0: of nothing another op may come.
        """
        if sample.rest != self.padded.rest or len(sample.numbers) != len(self.padded.numbers):
            return None
        changing = {position: one for one, places in self.positions.items() for position in places}
        found: dict[Changing, int | float] = {}
        for position, (bound, number) in enumerate(zip(self.padded.numbers, sample.numbers, strict=True)):
            one = changing.get(position)
            if repr(bound if one is None else found.setdefault(one, number)) != repr(number):
                return None
            if one is not None and not self._holds(position, bound, number):
                return None
        wholes = [found[one] for one in self.positions if one.whole]
        fractions = [found[one] for one in self.positions if not one.whole]
        return wholes, fractions  # pyright: ignore[reportReturnType]

    def _holds(self, position: int, bound: int | float, number: int | float) -> bool:
        size = self.padded.is_size[position]
        return 1 <= number <= bound if size else isinstance(number, float) or abs(number) <= _LARGEST


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, torch.Tensor):
            yield one


def sizes_of(node: Node) -> list[tuple[int, ...]]:
    """The shapes of the tensors that an op gives."""
    return [tuple(one.shape) for one in _tensors(node)]
