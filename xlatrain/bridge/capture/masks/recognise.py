"""Attention ops whose mask is something simpler: they are told what, and the mask is no longer made.

A kernel that knows a band and segments leaves out what nobody sees; a mask it would have to read. Known parts of a mask are
computed while capturing (:mod:`xlatrain.bridge.capture.masks.known`); what comes from the batch is recognised by how it was made,
never by its values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx.node import Node

import xlatrain.bridge.capture.attention  # noqa: F401  defines the ops
from xlatrain.bridge.capture.masks.band import WHOLE, Band
from xlatrain.bridge.capture.masks.conditions import (
    Condition,
    conditions_of,
    equal_numbers,
    is_of_keys,
    is_of_queries,
    known_part,
    same_for_all_rows,
)
from xlatrain.bridge.capture.masks.family import family_of
from xlatrain.bridge.capture.masks.known import KnownValues
from xlatrain.bridge.graph_nodes import NodeMaker, rewrite

_ATEN, _OURS = torch.ops.aten, torch.ops.xlatrain
_PLACES = {  # of the queries among an op's arguments; keys, values, mask, is_causal, scale come after them
    _OURS.attention.default: 0,
    _OURS.dropout_attention.default: 0,
    _OURS.attention_backward.default: 1,
    _OURS.dropout_attention_backward.default: 1,
}
_BANDED = {
    _OURS.attention.default: _OURS.banded_attention.default,
    _OURS.attention_backward.default: _OURS.banded_attention_backward.default,
}
_NOBODY = torch.iinfo(torch.int32).min
"""The number of a key that no query sees."""


@dataclass(frozen=True)
class _Simple:
    """A simple mask: a band, and nodes with numbers of segments, int32 (B or 1, L) and (B or 1, S)."""

    band: Band
    segments: tuple[Node, Node] | None


def recognise_masks(graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]) -> bool:
    """Rewrite the attention ops of a captured graph in place; whether there was any to rewrite.

    Args:
        constants: the tensors of ``get_attr`` nodes.
    """
    known = KnownValues(constants)
    found: dict[tuple[Node, tuple[int, int, int]], _Simple | None] = {}
    changed = False
    for node in list(graph.nodes):
        place = _PLACES.get(node.target)
        if place is None or node.args[place + 3] is None:
            continue
        q, k, mask = (node.args[place + i] for i in (0, 1, 3))
        shape = q.meta["val"].shape
        sizes = (shape[:-3].numel(), shape[-2], k.meta["val"].shape[-2])
        if (mask, sizes) not in found:
            found[mask, sizes] = _simple(NodeMaker(graph, node), mask, known, *sizes[1:])
        simple = found[mask, sizes]
        changed |= simple is not None and _tell(node, place, simple)
    return changed


def _tell(node: Node, place: int, simple: _Simple) -> bool:
    """Put it into an op in place of the mask; whether the op can be told."""
    before, after = node.args[: place + 3], node.args[place + 5 :]
    band = simple.band
    if simple.segments is None and (band.is_whole or band.is_causal):
        rewrite(node, node.target, (*before, None, band.is_causal, *after))
    elif node.target in _BANDED:
        segments = simple.segments or (None, None)
        rewrite(node, _BANDED[cast(Any, node.target)], (*before, *segments, band.left, band.right, *after))
    else:
        return False
    return True


def _simple(make: NodeMaker, mask: Node, known: KnownValues, queries: int, keys: int) -> _Simple | None:
    """Simplify a mask, with nodes for what comes from the batch; None if it is nothing simple."""
    whole = known.of(mask)
    seen = None if whole is None else _as_bool(whole, queries, keys)
    found = None if seen is None else _known(make, [seen])
    if found is not None:
        return found
    parts: list[torch.Tensor] = []
    padding: list[Condition] = []
    others: list[Condition] = []
    for condition in conditions_of(mask, known):
        part = known_part(condition, known, queries, keys)
        if condition.node.meta["val"].dtype == torch.bool and is_of_keys(condition, condition.node, keys):
            padding += [] if part is not None and bool(part.all()) else [condition]
        elif part is not None:
            parts.append(part)
        else:
            others.append(condition)
    pairs = {_pair(one, queries, keys) for one in others}
    simple = _known(make, parts)
    if simple is None or None in pairs or len(pairs) + (simple.segments is not None) > 1:
        return None
    (pair,) = pairs or (None,)
    numbers = (
        simple.segments
        if pair is None
        else tuple(_numbers(make, x, length) for x, length in zip(pair, (queries, keys), strict=True))
    )
    return _Simple(simple.band, _padded(make, numbers, padding, queries, keys))


def _as_bool(value: torch.Tensor, queries: int, keys: int) -> torch.Tensor | None:
    """(L, S): what is seen by a known mask of bools, or of numbers that are 0 or as good as minus infinity."""
    one = same_for_all_rows(value, queries, keys)
    if one is None or one.dtype == torch.bool:
        return one
    seen = one == 0
    hidden = (
        one <= max(torch.finfo(one.dtype).min, torch.finfo(torch.float32).min) if one.dtype != torch.float16 else one.isneginf()
    )
    return seen if bool((seen | hidden).all()) else None


def _known(make: NodeMaker, parts: list[torch.Tensor]) -> _Simple | None:
    if not parts:
        return _Simple(WHOLE, None)
    family = family_of(functools.reduce(torch.logical_and, parts))
    if family is None:
        return None
    return _Simple(family.band, None if family.segments is None else _constant(make, family.segments[0].tolist()))


def _constant(make: NodeMaker, numbers: list[int]) -> tuple[Node, Node]:
    """Numbers of segments that lie one after the other: how many of their ends come before a position."""
    ends = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
    positions = make(_ATEN.arange.start_step, 0, len(numbers), dtype=torch.int32, device=torch.device("cpu"))
    total = make(_ATEN.full.default, [1, len(numbers)], 0, dtype=torch.int32, device=torch.device("cpu"))
    for end in ends:
        after = make(_ATEN._to_copy.default, make(_ATEN.ge.Scalar, positions, end), dtype=torch.int32)
        total = make(_ATEN.add.Tensor, total, after)
    return total, total


def _pair(condition: Condition, queries: int, keys: int) -> tuple[Node, Node] | None:
    """The numbers of queries and keys that a condition compares."""
    given = equal_numbers(condition)
    for first, second in () if given is None else (given, given[::-1]):
        if is_of_queries(condition, first, queries) and is_of_keys(condition, second, keys):
            return first, second
    return None


def _numbers(make: NodeMaker, node: Node, length: int) -> Node:
    return make(_ATEN._to_copy.default, make(_ATEN.view.default, node, [-1, length]), dtype=torch.int32)


def _padded(make: NodeMaker, numbers: Any, padding: list[Condition], queries: int, keys: int) -> tuple[Node, Node] | None:
    """Numbers of segments with those of keys that are padding changed to one that no query has."""
    if not padding:
        return numbers
    seen = functools.reduce(functools.partial(make, _ATEN.bitwise_and.Tensor), [_shown(make, one, keys) for one in padding])
    if numbers is None:
        of_queries = make(_ATEN.full.default, [1, queries], 1, dtype=torch.int32, device=torch.device("cpu"))
        return of_queries, make(_ATEN._to_copy.default, seen, dtype=torch.int32)
    nobody = make(_ATEN.full.default, [1, 1], _NOBODY, dtype=torch.int32, device=torch.device("cpu"))
    return numbers[0], make(_ATEN.where.self, seen, numbers[1], nobody)


def _shown(make: NodeMaker, condition: Condition, keys: int) -> Node:
    """The keys that it lets see, bool (B or 1, S)."""
    node = make(_ATEN.view.default, condition.node, [-1, keys])
    return make(_ATEN.bitwise_not.default, node) if condition.negated else node
