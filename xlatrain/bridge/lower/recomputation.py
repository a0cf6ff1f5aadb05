"""Optimization barriers where a captured graph begins to recompute, and the values that go through them together.

``torch.utils.checkpoint`` leaves ``xlatrain::barrier`` ops on the inputs of a recomputation (``rematerialization.py``). Alone
they keep XLA from finding forward pass and recomputation equal, and nothing else: parameters that both use stay gathered and
converted in between, a recomputation may be moved in front of the gradient that it is for, and the gradients of weights, which
nothing but the optimizer waits for, behind all recomputations, each with the activations that it is made of. So the inputs,
the gradients that were computed since the recomputation before, and the parameters that are used again go through one barrier:
what stands before it is done before what stands after it begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx.node import Node

from xlatrain.bridge.capture.tracebacks import in_backward

BARRIER = torch.ops.xlatrain.barrier.default
_TRANSPARENT = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(frozen=True)
class Recomputation:
    """The beginning of a recomputation.

    Attributes:
        barriers: the ops on its inputs, next to each other in the graph.
        held: other values that go through the same barrier.
    """

    barriers: tuple[Node, ...]
    held: tuple[Node, ...]


def recomputations(graph: torch.fx.Graph) -> dict[Node, Recomputation]:
    """The recomputations of a graph, by the first of their barriers."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    starts = list(_starts(nodes))
    found: dict[Node, Recomputation] = {}
    before = 0
    for barriers, following in itertools.zip_longest(starts, starts[1:]):
        here = place[barriers[0]]
        end = len(nodes) if following is None else place[following[0]]
        inputs = {cast(Node, barrier.args[0]) for barrier in barriers}
        gradients = [
            node
            for node in nodes[before:here]
            if in_backward(node) and _is_float(node) and any(place[user] > here for user in node.users)
        ]
        again = [
            node
            for node in nodes
            if _is_input(node) and _is_float(node) and _spans([place[user] for user in node.users], here, end)
        ]
        held = [node for node in (*gradients, *again) if node not in inputs]
        found[barriers[0]] = Recomputation(tuple(barriers), tuple(held))
        before = here
    return found


def _starts(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """The barriers of each recomputation."""
    run: list[Node] = []
    for node in nodes:
        if node.target is BARRIER:
            run.append(node)
        elif run and node.target not in _TRANSPARENT:
            yield run
            run = []


def _is_input(node: Node) -> bool:
    """Whether it is an input of the graph, or another name of one."""
    while node.target in _TRANSPARENT:
        node = cast(Node, node.args[0])
    return node.op == "placeholder"


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _spans(users: Sequence[int], start: int, end: int) -> bool:
    """Whether a value is used before ``start`` and between it and ``end``."""
    return any(user < start for user in users) and any(start < user < end for user in users)
