"""Nodes of a graph that ``make_fx`` is making, or has made, for code that adds nodes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

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


@dataclass(frozen=True, slots=True)
class Expansion:
    """The nodes that an op became in a graph.

    Attributes:
        inputs: the nodes of its operands.
        nodes: those that it added.
        draw: the number of its first random draw.
    """

    inputs: tuple[Node, ...]
    nodes: tuple[CopiedNode, ...]
    draw: int

    @classmethod
    def from_nodes(cls, inputs: Sequence[Node], fresh: Sequence[Node], draw: int) -> Expansion | None:
        """The expansion of an op that added ``fresh``; None if these must not be copied."""
        inside = {*inputs, *fresh}
        if any(
            node.op != "call_function" or "val" not in node.meta or not inside.issuperset(node.all_input_nodes) for node in fresh
        ):
            return None
        known: dict[Node, int] = {}
        for place, node in enumerate((*inputs, *fresh)):
            known.setdefault(node, place)
        return cls(tuple(inputs), tuple([CopiedNode.from_node(node, known) for node in fresh]), draw)

    def copy(self, graph: torch.fx.Graph, nodes: Sequence[Node], draw: int) -> list[Node]:
        """Add the nodes once more, with ``nodes`` in place of the inputs and draws from the number ``draw`` on."""
        known = list(nodes)
        for copied in self.nodes:
            args, kwargs = copied.args, copied.kwargs
            if copied.slots is not None:
                new = list(args)
                for place, index in copied.slots:
                    new[place] = known[index]
                args = tuple(new)
            else:
                names = dict(zip((*self.inputs, *[one.node for one in self.nodes]), known, strict=False))
                args, kwargs = map_arg(args, names.__getitem__), map_arg(kwargs, names.__getitem__)
            if copied.draws:
                args = (*args[:-1], cast(int, args[-1]) - self.draw + draw)
            again = graph.create_node("call_function", copied.target, args, kwargs, copied.name)
            again.meta["val"] = copied.value
            again.meta[COPIED] = copied
            known.append(again)
        return known[len(nodes) :]
