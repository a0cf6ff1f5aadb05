"""The arithmetic of a captured step: the products that its model asks for, and those that kernels make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jax.sharding import Mesh
from torch.fx.node import Node, map_arg
from torch.utils.flop_counter import flop_registry

import xlatrain.bridge.capture.vocabulary  # noqa: F401  defines the ops
from xlatrain.bridge.capture.traceable.while_loop import loop_of
from xlatrain.bridge.lower.kernels.choice import Request, Splash, choose
from xlatrain.bridge.lower.kernels.chosen import is_backward, request_of_node

_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default, torch.ops.xlatrain.barrier.default)
_FORWARD, _BACKWARD = 2, 4
"""Products of attention: the model's backward pass has no recomputation of the scores, which every kernel makes."""


@dataclass(frozen=True)
class _Number:
    """The number of a value; equal values have the same."""

    value: int

    def __repr__(self) -> str:
        return f"%{self.value}"


def model_flops(graph: torch.fx.Graph) -> int:
    """Count the floating-point operations of matrix products and convolutions in a captured graph, over the whole batch.

    A value that is computed again counts once, so that recomputed layers do not; of attention what its band lets see.
    """
    return sum(_flops(node) for node in _distinct(graph))


def kernel_flops(graph: torch.fx.Graph, mesh: Mesh) -> int:
    """Count those of the TPU kernels on a mesh, over the whole batch: every block that they compute, recomputation included."""
    total = 0
    for node in graph.nodes:
        request = request_of_node(node)
        choice = None if request is None else choose(request, mesh)
        if request is not None and isinstance(choice, Splash):
            from xlatrain.bridge.lower.kernels.splash import Blocks, Shards

            features, (queries, keys) = max(request.queries[-1], request.values[-1]), request.lengths
            shards = Shards(choice.parts, choice.balanced)
            blocks = Blocks.of(queries // choice.parts, keys, features, request.dtype.itemsize, shards)
            blocks = replace(blocks, queries=blocks.queries * choice.parts)
            backward = 5 if blocks.sizes.use_fused_bwd_kernel else 7
            total += (backward if is_backward(node) else _FORWARD) * _product(request, blocks.computed(request.band))
    return total


def _distinct(graph: torch.fx.Graph) -> Iterator[Node]:
    """The ops of a graph, each value once."""
    numbers: dict[Node, _Number] = {}
    known: dict[str, _Number] = {}
    for node in graph.nodes:
        if node.target in _SAME:
            numbers[node] = numbers[cast(Node, node.args[0])]
            continue
        given = map_arg((node.args, node.kwargs), lambda one: cast(Any, numbers[one]))
        key = f"{node.target}{given}" if node.op == "call_function" else node.name
        if key not in known:
            known[key] = _Number(len(known))
            yield node
        numbers[node] = known[key]


def _flops(node: Any) -> int:
    request = request_of_node(node)
    if request is not None:
        queries, keys = request.lengths
        seen = queries * keys if request.mask else request.band.pairs(queries, keys)
        return (_BACKWARD if is_backward(node) else _FORWARD) * _product(request, seen)
    if node.target is torch.ops.xlatrain.while_loop.default:  # nobody knows how often it turns
        return model_flops(loop_of(node.args[2]).body.graph.graph)
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
    return count(*args, **kwargs, out_val=node.meta["val"])


def _product(request: Request, pairs: int) -> int:
    """FLOPs of a product of queries with keys, or of probabilities with values; their mean width where they differ."""
    heads = request.rows * request.queries[-3]
    return heads * pairs * (request.queries[-1] + request.values[-1])
