"""Nodes of a graph that ``make_fx`` is making, or has made, for code that adds nodes by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.node import Node, map_arg

from xlatrain.bridge.random import draws


def last_node(graph: torch.fx.Graph) -> Node:
    """The newest node, from which :func:`nodes_after` counts."""
    return next(iter(reversed(graph.nodes)))


def nodes_after(last: Node) -> list[Node]:
    """The nodes that were added to the graph after ``last``."""
    found = []
    node = last.next
    while node.op != "root":
        found.append(node)
        node = node.next
    return found


def op_name(node: Node) -> str:
    """The name of an ATen op or one of ours, without namespace and overload; empty for any other."""
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


def asked_name(node: Node) -> str | None:
    """The name that ``make_fx`` asks for, to which the graph may add a number: the op's without its overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else node.graph._target_to_str(packet.__name__)


def stands_for(tensor: torch.Tensor, node: Node, tracer: Any) -> None:
    """Let ``node`` represent ``tensor`` from now on in the graph that ``tracer`` makes."""
    proxy_tensor.set_proxy_slot(tensor, tracer, proxy_tensor._ProxyTensor(torch.fx.Proxy(node, tracer), None))


class NodeMaker:
    """Makes nodes of a finished graph, before a node whose user's line they share."""

    def __init__(self, graph: torch.fx.Graph, before: Node) -> None:
        self._graph, self._before = graph, before

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A node of an op of one result or of several."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(op, args, kwargs)
        values = [x.meta["val"] if isinstance(x, Node) else x for x in args]
        own = self._before.meta["val"]
        mode = next(
            x.fake_mode for x in (*values, *(own if isinstance(own, tuple | list) else [own])) if isinstance(x, FakeTensor)
        )
        with mode:
            node.meta = {name: value for name, value in self._before.meta.items() if name != COPIED}
            node.meta["val"] = op(*values, **kwargs)
        return node


@dataclass(frozen=True, slots=True)
class CopiedNode:
    """A node that is added to graphs again and again.

    Attributes:
        node: the first one.
        target, args, kwargs: of it.
        value: what it gives.
        name: the one that it asked for.
        slots: the positions of nodes among its arguments, and which of the known nodes these are (the operands, then what was
            added before); None where nodes are inside of its arguments.
        draws: whether its last argument is the number of a draw.
    """

    node: Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    name: str | None
    slots: tuple[tuple[int, int], ...] | None
    draws: bool

    @classmethod
    def from_node(cls, node: Node, known: dict[Node, int]) -> CopiedNode:
        used: list[Node] = []
        map_arg((node.args, node.kwargs), used.append)
        slots = tuple((place, known[arg]) for place, arg in enumerate(node.args) if isinstance(arg, Node))
        flat = slots if len(slots) == len(used) else None
        return cls(node, node.target, node.args, node.kwargs, node.meta["val"], asked_name(node), flat, draws(node.target))


COPIED = "xlatrain_copied"
"""Nodes keep there what they were written down from. They are alike: passes may give them other operands that look the same. One
that changes the rest of their arguments, or their target, does so by :func:`rewrite`."""


def copied_from(node: Node) -> CopiedNode | None:
    """The record, shared by several nodes, from which ``node`` was copied into the graph; None if it was not copied."""
    return node.meta.get(COPIED)


def rewrite(node: Node, target: Any, args: tuple[Any, ...]) -> None:
    """Make ``node`` another op of the same result, with these arguments: it is a copy of nothing any more."""
    node.target, node.args = target, args
    node.meta.pop(COPIED, None)
