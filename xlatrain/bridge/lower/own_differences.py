"""Differences of rows from themselves: the diagonal of ``z[:, None] - z[None]`` and of ``torch.cdist(z, z)``.

They are zero in torch, and a distance of zero has no gradient. XLA computes the rows anew where it subtracts them, and
multiplies and subtracts in one instruction, which rounds once: 1e-8 comes out, with a gradient of length one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx.node import Node

from xlatrain.bridge.lower.operands import canonical_dim

_aten: Any = torch.ops.aten
Pairs = tuple[tuple[int, int], ...]
"""Pairs of dims: an element is a difference of one from itself where its indices in the dims of each pair are equal."""
_Dims = tuple[int | None, ...]
"""For each dim of a view that of its source; None: of size one there, or new."""


def own_differences(graph: torch.fx.Graph) -> dict[Node, Pairs]:
    """The nodes of a graph whose elements are differences of a tensor from itself, where the pairs of dims say."""
    found = {}
    for node in graph.nodes:
        if node.target is _aten.sub.Tensor and not node.kwargs and all(isinstance(one, Node) for one in node.args):
            pairs = _pairs(node)
        elif node.target is _aten._cdist_forward.default:
            rows = len(_shape(node)) - 2
            pairs = ((rows, rows + 1),) if _are_one(*node.args[:2]) else ()
        else:
            continue
        if pairs:
            found[node] = pairs
    return found


def zero_of_themselves(value: jax.Array, pairs: Pairs) -> jax.Array:
    """``value`` with zeros where it is a difference of an element from itself; NaN stays."""
    places = functools.partial(lax.broadcasted_iota, jnp.int32, value.shape)
    same = functools.reduce(operator.and_, (places(first) == places(second) for first, second in pairs))
    return jnp.where(same & (value == value), jnp.zeros((), value.dtype), value)


def _pairs(node: Node) -> Pairs:
    (source, *of_first), (other, *of_second) = map(_way, node.args)
    if source is not other:
        return ()
    first, second = _dims(source, of_first), _dims(source, of_second)
    rank = len(_shape(node))
    first, second = ((None,) * (rank - len(dims)) + dims for dims in (first, second))
    pairs = []
    for dim, size in enumerate(_shape(source)):
        if size != 1:
            if first.count(dim) != 1 or second.count(dim) != 1:
                return ()
            pairs.append((first.index(dim), second.index(dim)))
    return tuple(pair for pair in pairs if pair[0] != pair[1])


def _are_one(one: Node, other: Node) -> bool:
    """Whether two tensors have the same elements at the same places."""
    (source, *views), (other_source, *other_views) = _way(one), _way(other)
    return source is other_source and _dims(source, views) == _dims(source, other_views)


def _way(node: Any) -> list[Node]:
    """The tensor that a view shows, and the views from there to it, of dims that are new, of size one, or in another order."""
    views = []
    while node.target in _VIEWS and not (node.target is _aten.view.default and _large(node) != _large(node.args[0])):
        views.append(node)
        node = node.args[0]
    return [node, *reversed(views)]


def _dims(source: Node, views: Sequence[Node]) -> _Dims:
    """The dims of the last of these views of ``source``."""
    dims: _Dims = tuple(range(len(_shape(source))))
    for view in views:
        dims = _VIEWS[view.target](view, dims)
    return dims


def _unsqueezed(view: Node, dims: _Dims) -> _Dims:
    place = canonical_dim(cast(int, view.args[1]), len(dims) + 1)
    return (*dims[:place], None, *dims[place:])


def _viewed(view: Node, dims: _Dims) -> _Dims:
    large = iter(dim for dim, size in zip(dims, _shape(view.args[0]), strict=True) if size != 1)
    return tuple(None if size == 1 else next(large) for size in _shape(view))


def _large(node: Any) -> list[int]:
    """The sizes other than one."""
    return [size for size in _shape(node) if size != 1]


def _expanded(view: Node, dims: _Dims) -> _Dims:
    sizes, before = _shape(view), _shape(view.args[0])
    new = len(sizes) - len(before)
    return (None,) * new + tuple(dim if size == old else None for dim, size, old in zip(dims, sizes[new:], before, strict=True))


def _permuted(view: Node, dims: _Dims) -> _Dims:
    return tuple(dims[canonical_dim(one, len(dims))] for one in cast(Any, view.args[1]))


def _transposed(view: Node, dims: _Dims) -> _Dims:
    first, second = (canonical_dim(cast(int, one), len(dims)) for one in view.args[1:3])
    order = list(dims)
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def _reversed(view: Node, dims: _Dims) -> _Dims:
    return dims[::-1]


def _same(view: Node, dims: _Dims) -> _Dims:
    return dims


_VIEWS = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.view.default: _viewed,
    _aten.expand.default: _expanded,
    _aten.permute.default: _permuted,
    _aten.transpose.int: _transposed,
    _aten.t.default: _reversed,
}


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
