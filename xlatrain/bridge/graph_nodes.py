"""Nodes of the graph that ``make_fx`` is making: what those need who write some of them down themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.node import Node


def last_node(graph: torch.fx.Graph) -> Node:
    """The newest node, from which :func:`nodes_after` counts."""
    return next(iter(reversed(graph.nodes)))


def nodes_after(last: Node) -> list[Node]:
    """What was added to the graph since ``last``."""
    found = []
    node = last.next
    while node.op != "root":
        found.append(node)
        node = node.next
    return found


def asked_name(node: Node) -> str | None:
    """The name that ``make_fx`` asks for, to which the graph may add a number: the op's without its overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else node.graph._target_to_str(packet.__name__)


def stands_for(tensor: torch.Tensor, node: Node, tracer: Any) -> None:
    """From now on ``node`` is what ``tensor`` is in the graph that ``tracer`` makes."""
    proxy_tensor.set_proxy_slot(tensor, tracer, proxy_tensor._ProxyTensor(torch.fx.Proxy(node, tracer), None))
