"""Images with their channels last from convolution to convolution, for XLA:CPU.

XLA:CPU's convolutions read and give images channels last (``lowerings/canonical_convolution.py``); torch's graphs have
channels second. XLA finds out by itself for some of the ops between two convolutions that they might as well run in the
convolutions' order, and computes others, most of a batch norm's backward among them, in torch's order, with a copy in each
direction: a quarter of a CNN's step (``benchmarks/notes/speed_on_cpu.md``). So ops that work element by element, and sums over
whole images, run channels last wherever their operands come from a convolution. Each op's operands are turned and its result
turned back; between two such ops XLA cancels the two.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from torch.fx.node import Node
from torch.utils import _pytree as pytree

_aten = torch.ops.aten

_CONVOLUTIONS = (_aten.convolution.default, _aten.convolution_overrideable.default)
_GRADIENTS = (_aten.convolution_backward.default, _aten.convolution_backward_overrideable.default)
_BY_ELEMENT = (_aten._to_copy.default, _aten.alias.default, _aten.detach.default)
"""Element by element, though torch does not tag them so."""
_OVER_IMAGES = (_aten.sum.dim_IntList, _aten.mean.dim, _aten.var_mean.correction, _aten.var.correction, _aten.amax.default)
"""Reductions whose second argument is the dims."""


def images(graph: torch.fx.Graph) -> frozenset[Node]:
    """The ops of ``graph`` that are to run by :func:`channels_last`; convolutions are not of them, they turn by themselves."""
    turned: set[Node] = set()
    chosen: set[Node] = set()
    for node in graph.nodes:
        if _is_image_of_convolution(node):
            turned.add(node)
        elif turned and node.op == "call_function" and not turned.isdisjoint(_images_among_operands(node)):
            if _by_element(node):
                turned.add(node)
                chosen.add(node)
            elif _over_images(node):
                chosen.add(node)
    return frozenset(chosen)


def channels_last(lowering: Callable[..., Any], node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the lowering of an op of :func:`images` channels last; arguments and results have their channels in dim 1."""
    rank = max(_rank(source) for source in node.all_input_nodes)
    if node.target in _OVER_IMAGES:
        args = (args[0], [_turned_dim(dim, rank) for dim in args[1]], *args[2:])
    args, kwargs = pytree.tree_map_only(jax.Array, lambda x: _turned(x, rank), (args, kwargs))
    back = lambda x: jnp.moveaxis(x, -1, 1) if x.ndim == rank else x  # noqa: E731
    return pytree.tree_map_only(jax.Array, back, lowering(*args, **kwargs))


def _is_image_of_convolution(node: Node) -> bool:
    """The result of a convolution, or its gradient by input."""
    if node.target in _CONVOLUTIONS:
        return True
    if node.target is not operator.getitem:
        return False
    source, index = cast(tuple[Node, int], node.args)
    return source.target in _GRADIENTS and index == 0


def _images_among_operands(node: Node) -> list[Node]:
    """The operands of ``node`` that have the most dims and are not broadcast along any dim."""
    shapes = {source: source.meta["val"].shape for source in node.all_input_nodes if _rank(source)}
    rank = max(map(len, shapes.values()), default=0)
    size = max((math.prod(shape) for shape in shapes.values() if len(shape) == rank), default=0)
    return [source for source, shape in shapes.items() if len(shape) == rank and math.prod(shape) == size]


def _by_element(node: Node) -> bool:
    op = node.target
    result = node.meta.get("val")
    if not isinstance(op, torch._ops.OpOverload) or not isinstance(result, torch.Tensor):
        return False
    if op not in _BY_ELEMENT and torch.Tag.pointwise not in op.tags:
        return False
    return result.ndim == max(map(_rank, node.all_input_nodes))


def _over_images(node: Node) -> bool:
    """Whether an op is a sum over dims that leaves the others in their order."""
    if node.target not in _OVER_IMAGES or len(node.args) < 2 or not node.args[1]:
        return False
    rank = _rank(node.all_input_nodes[0])
    dims = {dim % rank for dim in cast(list[int], node.args[1])}
    kept = [dim for dim in range(rank) if dim not in dims]
    places = [_turned_dim(dim, rank) for dim in kept]
    keeps_dims = cast(torch.Tensor, pytree.tree_leaves(node.meta["val"])[0]).ndim == rank
    return keeps_dims or places == sorted(places)


def _turned(x: jax.Array, rank: int) -> jax.Array:
    """``x``, broadcast against ``rank`` dims as torch does, with the second dim last; numbers stay numbers."""
    if x.ndim == 0:
        return x
    return jnp.moveaxis(x.reshape((1,) * (rank - x.ndim) + x.shape), 1, -1)


def _turned_dim(dim: int, rank: int) -> int:
    """The index that dim ``dim`` of ``rank`` has once dim 1 has been moved to the end."""
    dim %= rank
    return dim if dim == 0 else rank - 1 if dim == 1 else dim - 1


def _rank(node: Node) -> int:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, torch.Tensor) else 0
