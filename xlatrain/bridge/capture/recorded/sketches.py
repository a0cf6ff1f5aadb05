"""Sketches of what ops become in a graph: without its nodes and tensors, so that the graphs of other runs can have the same.

A process captures the same ops again and again: each step twice where its update is apart, each form of its batches, each of a
script's models. Functionalization, decomposition and bookkeeping are most of a graph's time, and a function of the kind of an op
(:mod:`xlatrain.bridge.capture.recorded.kinds`) and of how its operands look in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Node, map_aggregate, map_arg

from xlatrain.bridge.capture.recorded.fake_results import Fakes, NotAlike, look_without_grad
from xlatrain.bridge.capture.torchs_own import implementations_are_torchs
from xlatrain.bridge.graph_nodes import asked_name
from xlatrain.bridge.random import draws


@dataclass(frozen=True, slots=True)
class _Place:
    """A node, by its place among the operands and what was added after them."""

    place: int


@dataclass(frozen=True, slots=True)
class _Look:
    """A tensor, by how it looks."""

    look: Any


@dataclass(frozen=True, slots=True)
class Sketch:
    """The nodes that an op becomes.

    Attributes:
        rows: of each the target, arguments, value and the name that it asks for.
        results: the places among these nodes of what the op returns; None for no tensor.
    """

    rows: tuple[tuple[Any, Any, Any, Any, str | None], ...]
    results: list[int | None]

    @classmethod
    def of(cls, inputs: Sequence[Node], fresh: Sequence[Node], results: list[int | None]) -> Sketch | None:
        """The sketch of an op that added ``fresh``; None where it draws, or a value is more than a plain tensor."""
        if any(draws(node.target) for node in fresh):
            return None
        places: dict[Node, _Place] = {}
        for place, node in enumerate((*inputs, *fresh)):
            places.setdefault(node, _Place(place))
        try:
            rows = [
                (
                    node.target,
                    *map_arg((node.args, node.kwargs), cast(Any, places.__getitem__)),
                    _shown(node.meta["val"]),
                    asked_name(node),
                )
                for node in fresh
            ]
        except NotAlike:
            return None
        return cls(tuple(rows), results)

    def may_stand_for(self, op: Any) -> bool:
        """Whether nobody but torch has given ``op``, or an op of these nodes, a function in Python."""
        ops = (row[0] for row in self.rows if isinstance(row[0], torch._ops.OpOverload))
        return implementations_are_torchs((op, *ops))

    def add(self, graph: torch.fx.Graph, inputs: Sequence[Node], fakes: Fakes) -> list[Node]:
        """Add the nodes to a graph whose values are tensors of ``fakes``."""
        known = list(inputs)

        def given(value: Any) -> Any:
            return known[value.place] if type(value) is _Place else value

        for target, args, kwargs, value, name in self.rows:
            args, kwargs = map_aggregate(args, given), map_aggregate(kwargs, given)
            node = graph.create_node("call_function", target, args, kwargs, name)
            node.meta["val"] = map_aggregate(value, lambda one: fakes.of_look(one.look) if type(one) is _Look else one)
            known.append(node)
        return known[len(inputs) :]


def _shown(value: Any) -> Any:
    """A node's value with looks in place of its tensors.

    Raises:
        NotAlike: it has others than plain tensors.
    """
    if type(value) in (list, tuple):
        return type(value)(map(_shown, value))
    if value is None:
        return None
    if type(value) is not FakeTensor:
        raise NotAlike
    return _Look(look_without_grad(value))
