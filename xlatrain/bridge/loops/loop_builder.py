"""Copies of a run as a loop: the values that each iteration uses of its own, of the iteration before, and of outside."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import Node

from xlatrain.bridge.graph_nodes import op_name
from xlatrain.bridge.loops.schedule import (
    BodyOp,
    BodyValue,
    Carried,
    Draws,
    Key,
    Loop,
    LoopConstant,
    Operand,
    Rolled,
    Scanned,
    ScanOutput,
    Source,
    Stack,
    operands_of,
)
from xlatrain.bridge.random import draws

# fmt: off
_VIEWS = frozenset((
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "squeeze", "unsqueeze", "alias", "detach", "clone",
    "select", "reshape", "diagonal",
))
# fmt: on
_COMPARED = 4  # ops, one on the result of the other: views and casts of a table


class Unrollable(Exception):
    """The copies of a run do not use each other's results as the iterations of a loop would."""


class LoopBuilder:
    """Makes a loop of a run's copies, or finds that they are none.

    Attributes:
        restacks: whether the loop scans over values of which an earlier loop made some: all of them are copied into a new array.
    """

    def __init__(self, copies: list[Sequence[Node]], rolled: Rolled) -> None:
        self._rolled = rolled
        self._loop = Loop(copies)
        self._own = {node: (k, p) for k, nodes in enumerate(copies) for p, node in enumerate(nodes)}
        self._hoisted: set[Key] = set()
        self._carries: dict[tuple[Node, Key], Carried] = {}
        self._varying: dict[tuple[Node, ...], Operand] = {}
        self._views: list[BodyOp] = []
        self._direction: bool | None = None
        self.restacks = False

    def build(self) -> Loop:
        """The loop.

        Raises:
            Unrollable: copies use something differently.
        """
        loop = self._loop
        body = []
        operands = [[operands_of(node) for node in nodes] for nodes in loop.copies]
        for position, key in enumerate(loop.copies[0]):
            slots = list(zip(*(copy[position] for copy in operands), strict=True))
            found = tuple(self._operand(slot) for slot in slots)
            if all(isinstance(operand, LoopConstant) for operand in found) and not draws(key.target):
                self._hoisted.add(key)
            else:
                body.append(BodyOp(key, key, found, self._draw(position)))
        if any(key in self._hoisted for _, key in loop.carries):
            raise Unrollable("what is carried on does not change")
        loop.body = [*self._views, *body]
        loop.reverse = bool(self._direction)
        loop.scanned = [self._ordered(source) for source in loop.scanned]
        return loop

    def _operand(self, slot: tuple[Node, ...]) -> Operand:
        """The operand that stands in the body for one operand of one op, given the nodes that the copies use there."""
        places = list(map(self._own.get, slot))
        first, later = places[0], places[1:]
        if first is not None:
            if places == list(zip(range(len(slot)), itertools.repeat(first[1]))):
                key = self._loop.copies[0][first[1]]
                return LoopConstant(key) if key in self._hoisted else BodyValue(key)
        elif later and all(place is not None and place == (k, later[0][1]) for k, place in enumerate(later)):  # pyright: ignore[reportOptionalSubscript]
            if all(self._are_equal(slot[0], node) for node in slot[1:]):
                return LoopConstant(slot[0])  # made anew in each copy, for the next: a view of a table, say
            return self._carry(slot[0], self._loop.copies[0][self._own[slot[1]][1]])
        elif not any(later):
            return self._from_outside(slot)
        raise Unrollable(f"{slot[0].name}, {slot[1].name}, … are used differently from copy to copy")

    def _are_equal(self, one: Any, other: Any, depth: int = _COMPARED) -> bool:
        """Whether two nodes, or arguments of nodes, are the same computation of the same values; False where that lies deeper."""
        if isinstance(one, Node) and isinstance(other, Node):
            one, other = self._rolled.same_as.get(one, one), self._rolled.same_as.get(other, other)
            if one is other:
                return True
            if depth == 0 or one.op != "call_function" or one.target is not other.target:
                return False
            arguments = (one.args, one.kwargs), (other.args, other.kwargs)
            return self._are_equal(*arguments, depth - 1)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return one.keys() == other.keys() and all(self._are_equal(one[name], other[name], depth) for name in one)
        if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
            return len(one) == len(other) and all(self._are_equal(a, b, depth) for a, b in zip(one, other, strict=True))
        return type(one) is type(other) and one == other

    def _carry(self, init: Node, key: Key) -> Operand:
        """The carried value that begins as ``init`` and goes on as the result ``key`` of each copy.

        Raises:
            Unrollable: their shapes or dtypes differ.
        """
        if not isinstance(init.meta.get("val"), torch.Tensor) or not _same_spec(init, key):
            raise Unrollable(f"{init.name} is not what is carried on ({key.name})")
        if (init, key) not in self._carries:
            self._carries[init, key] = Carried(len(self._loop.carries))
            self._loop.carries.append((init, key))
        return self._carries[init, key]

    def _from_outside(self, slot: tuple[Node, ...]) -> Operand:
        """The operand for values from outside, one node per copy: a constant if they are the same node, else scanned."""
        slot = tuple(map(self._rolled.same_as.get, slot, slot))
        if slot.count(slot[0]) == len(slot):
            return LoopConstant(slot[0])
        if slot not in self._varying:
            self._varying[slot] = self._vary(slot)
        return self._varying[slot]

    def _vary(self, slot: tuple[Node, ...]) -> Operand:
        """A value from outside that differs from copy to copy."""
        if any(not isinstance(node.meta.get("val"), torch.Tensor) for node in slot):
            raise Unrollable(f"{slot[0].name} has several results, outside of the loop")
        found = self._emission(slot)
        views = op_name(slot[0]) in _VIEWS and len(set(map(self._rolled.alike.number, slot))) == 1
        if views and not (found and isinstance(found.value, Carried)):
            return self._view_again(slot)
        self.restacks |= found is None and any(node in self._rolled.places for node in slot)
        return self._scan(found or Stack(slot))

    def _view_again(self, slot: tuple[Node, ...]) -> Operand:
        """A view that was taken outside, taken in every copy."""
        viewed = self._from_outside(tuple(operands_of(node)[0] for node in slot))
        self._views.append(BodyOp(slot[0], slot[0], (viewed,)))
        return BodyValue(slot[0])

    def _emission(self, slot: tuple[Node, ...]) -> ScanOutput | None:
        """The earlier loop whose copies made the values, in order or in reverse; or which carried them in."""
        places = [self._rolled.places.get(node) for node in slot]
        known = [place for place in places if place is not None]
        if not known or any(place.loop is not known[0].loop or place.position != known[0].position for place in known):
            return None
        loop = known[0].loop
        if len(known) == len(places):
            return self._slice(loop, known[0].key, [loop.index(place.copy) for place in known])
        for number, (init, key) in enumerate(loop.carries):
            if key is known[0].key and all(p is not None or node is init for node, p in zip(slot, places, strict=True)):
                return self._slice(loop, Carried(number), [loop.index(p.copy + 1 if p else 0) for p in places])
        return None

    def _slice(self, loop: Loop, value: Key | Carried, indices: list[int]) -> ScanOutput | None:
        step = indices[1] - indices[0]
        if abs(step) != 1 or any(b - a != step for a, b in itertools.pairwise(indices)):
            return None
        if max(indices) >= loop.count:
            return None
        if self._direction is None:
            self._direction = step < 0
        return ScanOutput(loop, value, min(indices), len(indices), flip=(step < 0) != self._direction)

    def _scan(self, source: Source) -> Scanned:
        if source not in self._loop.scanned:
            self._loop.scanned.append(source)
        return Scanned(self._loop.scanned.index(source))

    def _draw(self, position: int) -> Scanned | None:
        nodes = [copy[position] for copy in self._loop.copies]
        if not draws(nodes[0].target):
            return None
        return self._scan(Draws(tuple(int(node.args[-1]) for node in nodes)))  # pyright: ignore[reportArgumentType]

    def _ordered(self, source: Source) -> Source:
        """Stacks are collected in the order of the copies; turn them into the order of the arrays."""
        if not self._loop.reverse or isinstance(source, ScanOutput):
            return source
        return Stack(source.nodes[::-1]) if isinstance(source, Stack) else Draws(source.numbers[::-1])


def _same_spec(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype == y.dtype
