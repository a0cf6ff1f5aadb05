"""Roll the repeated layers of a captured graph up into loops: lowered and compiled once, run by ``lax.scan``.

The graph is pure and complete, forward and backward pass, so nothing has to be assumed of the user's Python: copies of a run
(:mod:`xlatrain.bridge.repetition`) become a loop exactly if each uses its own results, results of the copy before it (these are
carried), and values from outside, at the same places. Values from outside that differ from copy to copy are scanned over:

- parameters are stacked;
- what the forward loop saved for the backward loop is emitted by the one and scanned by the other, in reverse;
- views of either are taken again inside of the loop that needs them, instead of being saved;
- numbers of random draws are scanned, so that every layer draws what it would have drawn.

What no operand of which differs between copies is computed once, before the loop.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from torch.fx.node import Node, map_arg

from xlatrain.bridge.random import draws
from xlatrain.bridge.repetition import Kinds, Run, longest_run

Key: TypeAlias = Node
"""The first copy's node stands for its place in the body."""


@dataclass(frozen=True)
class Inside:
    """The result of an op of the same copy."""

    key: Key


@dataclass(frozen=True)
class Carried:
    """The ``index``-th carried value."""

    index: int


@dataclass(frozen=True)
class Scanned:
    """This copy's slice of the ``index``-th scanned array."""

    index: int


@dataclass(frozen=True)
class Outside:
    """A value that is the same for every copy."""

    node: Node


Operand: TypeAlias = Inside | Carried | Scanned | Outside


@dataclass(frozen=True)
class Stack:
    """Scanned: the values of ``nodes``, one per copy, in the order of the array."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Emission:
    """Scanned: ``count`` values that an earlier loop emitted, from position ``start`` of its array; ``flip`` reverses them."""

    loop: Loop
    value: Key | Carried
    start: int
    count: int
    flip: bool


@dataclass(frozen=True)
class Draws:
    """Scanned: numbers of random draws, in the order of the array."""

    numbers: tuple[int, ...]


Source: TypeAlias = Stack | Emission | Draws


@dataclass(frozen=True)
class BodyOp:
    """One op of a loop's body.

    Attributes:
        node: what is computed; its arguments are replaced by ``operands``, one per node among them, in the order of ``map_arg``.
        key: under which later ops find the result.
        draw: where a random op finds the number of its draw.
    """

    node: Node
    key: Key
    operands: tuple[Operand, ...]
    draw: Scanned | None = None


@dataclass(eq=False)
class Loop:
    """``count`` copies of a body.

    Attributes:
        copies: the nodes of each copy.
        reverse: the arrays' order is from the last copy to the first.
        body: ops in order.
        carries: initial value and the op whose result is carried to the next copy.
        scanned: what is scanned over.
        emitted: what other parts of the graph need of every copy, in the order of the arrays.
    """

    copies: list[Sequence[Node]]
    reverse: bool = False
    body: list[BodyOp] = field(default_factory=list)
    carries: list[tuple[Node, Key]] = field(default_factory=list)
    scanned: list[Source] = field(default_factory=list)
    emitted: list[Key | Carried] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.copies)

    def index(self, copy: int) -> int:
        """Where a copy is in the arrays."""
        return self.count - 1 - copy if self.reverse else copy

    def emit(self, value: Key | Carried) -> None:
        if value not in self.emitted:
            self.emitted.append(value)

    def __str__(self) -> str:
        return f"{self.count} × {len(self.copies[0])} ops"


@dataclass(frozen=True)
class Place:
    """Where a node that was rolled up has gone: ``position`` in copy ``copy`` of ``loop``."""

    loop: Loop
    copy: int
    position: int

    @property
    def key(self) -> Key:
        return self.loop.copies[0][self.position]


@dataclass(frozen=True)
class Schedule:
    """A graph in the order of execution.

    Attributes:
        steps: nodes and loops.
        places: rolled-up nodes.
        same_as: copies of a node that was hoisted out of a loop → the one that is computed.
        refused: why runs stayed as they are.
    """

    steps: list[Node | Loop]
    places: Mapping[Node, Place]
    same_as: Mapping[Node, Node]
    refused: tuple[str, ...]

    @property
    def loops(self) -> list[Loop]:
        return [step for step in self.steps if isinstance(step, Loop)]

    def stacked_inputs(self) -> list[tuple[int, ...]]:
        """The inputs that loops want stacked, by their positions among all inputs, each in one stack at most."""
        inputs = [step for step in self.steps if isinstance(step, Node) and step.op == "placeholder"]
        position = {node: i for i, node in enumerate(inputs)}
        stacks = [source.nodes for loop in self.loops for source in loop.scanned if isinstance(source, Stack)]
        found: list[tuple[int, ...]] = []
        taken: set[int] = set()
        for nodes in stacks:
            stack = tuple(position.get(node, -1) for node in nodes)
            if -1 not in stack and taken.isdisjoint(stack) and len(set(stack)) == len(stack):
                found.append(stack)
                taken.update(stack)
        return found


class _Unrollable(Exception):
    """The copies of a run do not use each other's results as the iterations of a loop would."""


# fmt: off
_VIEWS = frozenset((
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "squeeze", "unsqueeze", "alias", "detach", "clone",
    "select", "reshape", "diagonal",
))
_HEAVY = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "attention", "attention_backward", "grouped_mm",
    "recurrence", "recurrence_backward",
))
# fmt: on
_ATTEMPTS = 8
_PHASES = 16
_SCORED_COPIES = 3


ENVIRONMENT = "XLATRAIN_ROLL_LAYERS"


def copies_to_roll(*, offloading: bool = False) -> int:
    """From how many copies on layers are rolled up: 16, or what the environment variable ``XLATRAIN_ROLL_LAYERS`` says.

    Args:
        offloading: layers send activations to host memory. 3 then: in a loop each is there before the next layer begins, while
            XLA keeps many of those of unrolled layers on the device for a while.

    Raises:
        ValueError: the variable is neither ``off`` nor a number from 3 on.
    """
    text = os.environ.get(ENVIRONMENT, "3" if offloading else "16")
    if text == "off":
        return sys.maxsize
    if not text.isdigit() or int(text) < 3:
        raise ValueError(
            f"{ENVIRONMENT}={text!r}: expected 'off', or from how many equal layers on they become a loop (3 or more)"
        )
    return int(text)


def unrolled(graph: torch.fx.Graph) -> Schedule:
    """``graph`` as it is."""
    return Schedule(list(graph.nodes), {}, {}, ())


def roll(graph: torch.fx.Graph, at_least: int) -> Schedule:
    """Roll up what repeats at least ``at_least`` times in ``graph``, which is pure."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    alike = Kinds()
    rolled = _Rolled(alike)
    refused: list[str] = []
    runs = _runs(calls, alike.of(calls), at_least)
    for run in sorted(runs, key=lambda run: run.start):  # a loop may scan what an earlier one emitted
        try:
            rolled.add(_best_phase(calls[run.stretch], run, rolled))
        except _Unrollable as error:
            refused.append(f"{run.count} × {run.period} ops ({error})")
    schedule = rolled.schedule(graph, tuple(refused))
    problem = _out_of_order(schedule)
    if problem is not None:
        loops = ", ".join(map(str, schedule.loops))
        return replace(unrolled(graph), refused=(*refused, f"{loops} ({problem.name} would be needed before it is there)"))
    return schedule


def _out_of_order(schedule: Schedule) -> Node | None:
    """A node that a step needs before it is there; None in a sound schedule."""
    there: set[Node | Loop] = set()
    for step in schedule.steps:
        for node in needed_by(step):
            known = schedule.same_as.get(node, node)
            place = schedule.places.get(known)
            if known not in there and (place is None or place.loop not in there):
                return node
        there.add(step)
    return None


def _runs(calls: Sequence[Node], numbers: np.ndarray, at_least: int) -> Iterator[Run]:
    """What repeats and is worth a loop, those that save most first; they do not overlap."""
    for _ in range(_ATTEMPTS):
        run = longest_run(numbers, at_least)
        if run is None:
            return
        if any(_name(node) in _HEAVY for node in calls[run.stretch][: run.period]):
            yield run
        numbers[run.stretch] = [-1 - i for i in range(*run.stretch.indices(len(calls)))]


def _name(node: Node) -> str:
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


def _best_phase(nodes: Sequence[Node], run: Run, rolled: _Rolled) -> Loop:
    """The loop that starts where least has to be carried and scanned: a run may be longer than its copies."""
    phases = range(min(run.slack, _PHASES) + 1)
    if len(phases) == 1:
        return _Builder(_copies(nodes, 0, run.period, run.count), rolled).build()
    scores: dict[int, int] = {}
    problem = _Unrollable("no copies")
    for phase in phases:
        try:
            loop = _Builder(_copies(nodes, phase, run.period, min(run.count, _SCORED_COPIES)), rolled).build()
            scores[phase] = len(loop.carries) * 2 + len(loop.scanned)
        except _Unrollable as error:
            problem = error
    if not scores:
        raise problem
    best = min(scores, key=lambda phase: scores[phase])
    return _Builder(_copies(nodes, best, run.period, run.count), rolled).build()


def _copies(nodes: Sequence[Node], phase: int, period: int, count: int) -> list[Sequence[Node]]:
    return [nodes[phase + k * period : phase + (k + 1) * period] for k in range(count)]


class _Rolled:
    """What is rolled up already."""

    def __init__(self, alike: Kinds) -> None:
        self.alike = alike
        self.loops: list[Loop] = []
        self.places: dict[Node, Place] = {}
        self.same_as: dict[Node, Node] = {}

    def add(self, loop: Loop) -> None:
        self.loops.append(loop)
        for copy, nodes in enumerate(loop.copies):
            for position, node in enumerate(nodes):
                self.places[node] = Place(loop, copy, position)
        inside = {op.key for op in loop.body}
        for position, key in enumerate(loop.copies[0]):
            if key not in inside:  # hoisted
                for nodes in loop.copies:
                    self.same_as[nodes[position]] = key
                    del self.places[nodes[position]]
        for source in loop.scanned:
            if isinstance(source, Emission):
                source.loop.emit(source.value)

    def schedule(self, graph: torch.fx.Graph, refused: tuple[str, ...]) -> Schedule:
        steps: list[Node | Loop] = []
        first = {loop.copies[0][0]: loop for loop in self.loops}
        waiting: Loop | None = None  # a loop stands after its own nodes: some were hoisted out of it
        hoisted = set(self.same_as.values())
        for node in graph.nodes:
            if node.op == "get_attr":  # a constant that a layer names where it uses it
                steps.append(node)
                continue
            stays = node not in self.places and node not in self.same_as
            if waiting is not None and (stays or node in first):
                steps.append(waiting)
                waiting = None
            waiting = first.get(node, waiting)
            if stays or node in hoisted:
                steps.append(node)
        return self._with_emissions(Schedule(steps, self.places, self.same_as, refused))

    def _with_emissions(self, schedule: Schedule) -> Schedule:
        """See to it that loops emit what others than loops' scans need of them."""
        for step in schedule.steps:
            for node in needed_by(step):
                place = self.places.get(node)
                if place is not None and not is_final_carry(place):
                    place.loop.emit(place.key)
        return schedule


def is_final_carry(place: Place) -> bool:
    """Whether a loop's final carried values include the node."""
    return place.copy == place.loop.count - 1 and any(key is place.key for _, key in place.loop.carries)


def needed_by(step: Node | Loop) -> Iterable[Node]:
    """The nodes whose values a step uses, besides what loops emit for each other."""
    if isinstance(step, Node):
        return operands_of(step)
    stacked = [node for source in step.scanned if isinstance(source, Stack) for node in source.nodes]
    return [*used_whole(step), *stacked]


def used_whole(loop: Loop) -> list[Node]:
    """The nodes from outside whose values a loop uses as they are, not in a stack."""
    outside = [operand.node for op in loop.body for operand in op.operands if isinstance(operand, Outside)]
    return [*outside, *(init for init, _ in loop.carries)]


def operands_of(node: Node) -> list[Node]:
    """The nodes among an op's arguments, in the order of ``map_arg``, with repetitions."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs) if node.kwargs else node.args, found.append)
    return found


class _Builder:
    """Makes a loop of copies, or finds out that it is none."""

    def __init__(self, copies: list[Sequence[Node]], rolled: _Rolled) -> None:
        self._rolled = rolled
        self._loop = Loop(copies)
        self._own = {node: (k, p) for k, nodes in enumerate(copies) for p, node in enumerate(nodes)}
        self._hoisted: set[Key] = set()
        self._carries: dict[tuple[Node, Key], Carried] = {}
        self._varying: dict[tuple[Node, ...], Operand] = {}
        self._views: list[BodyOp] = []
        self._direction: bool | None = None

    def build(self) -> Loop:
        """The loop.

        Raises:
            _Unrollable: copies use something differently.
        """
        loop = self._loop
        body = []
        operands = [[operands_of(node) for node in nodes] for nodes in loop.copies]
        for position, key in enumerate(loop.copies[0]):
            slots = list(zip(*(copy[position] for copy in operands), strict=True))
            found = tuple(self._operand(slot) for slot in slots)
            if all(isinstance(operand, Outside) for operand in found) and not draws(key.target):
                self._hoisted.add(key)
            else:
                body.append(BodyOp(key, key, found, self._draw(position)))
        if any(key in self._hoisted for _, key in loop.carries):
            raise _Unrollable("what is carried on does not change")
        loop.body = [*self._views, *body]
        loop.reverse = bool(self._direction)
        loop.scanned = [self._ordered(source) for source in loop.scanned]
        return loop

    def _operand(self, slot: tuple[Node, ...]) -> Operand:
        """What the copies use at one place of one op."""
        places = list(map(self._own.get, slot))
        first, later = places[0], places[1:]
        if first is not None:
            if places == list(zip(range(len(slot)), itertools.repeat(first[1]))):
                key = self._loop.copies[0][first[1]]
                return Outside(key) if key in self._hoisted else Inside(key)
        elif later and all(place is not None and place == (k, later[0][1]) for k, place in enumerate(later)):  # pyright: ignore[reportOptionalSubscript]
            return self._carry(slot[0], self._loop.copies[0][self._own[slot[1]][1]])
        elif not any(later):
            return self._from_outside(slot)
        raise _Unrollable(f"{slot[0].name}, {slot[1].name}, … are used differently from copy to copy")

    def _carry(self, init: Node, key: Key) -> Operand:
        if not isinstance(init.meta.get("val"), torch.Tensor) or not _same_spec(init, key):
            raise _Unrollable(f"{init.name} is not what is carried on ({key.name})")
        if (init, key) not in self._carries:
            self._carries[init, key] = Carried(len(self._loop.carries))
            self._loop.carries.append((init, key))
        return self._carries[init, key]

    def _from_outside(self, slot: tuple[Node, ...]) -> Operand:
        slot = tuple(map(self._rolled.same_as.get, slot, slot))
        if slot.count(slot[0]) == len(slot):
            return Outside(slot[0])
        if slot not in self._varying:
            self._varying[slot] = self._vary(slot)
        return self._varying[slot]

    def _vary(self, slot: tuple[Node, ...]) -> Operand:
        """A value from outside that differs from copy to copy."""
        if any(not isinstance(node.meta.get("val"), torch.Tensor) for node in slot):
            raise _Unrollable(f"{slot[0].name} has several results, outside of the loop")
        found = self._emission(slot)
        views = _name(slot[0]) in _VIEWS and len(set(map(self._rolled.alike.number, slot))) == 1
        if views and not (found and isinstance(found.value, Carried)):
            return self._view_again(slot)
        return self._scan(found or Stack(slot))

    def _view_again(self, slot: tuple[Node, ...]) -> Operand:
        """A view that was taken outside, taken in every copy."""
        viewed = self._from_outside(tuple(operands_of(node)[0] for node in slot))
        self._views.append(BodyOp(slot[0], slot[0], (viewed,)))
        return Inside(slot[0])

    def _emission(self, slot: tuple[Node, ...]) -> Emission | None:
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

    def _slice(self, loop: Loop, value: Key | Carried, indices: list[int]) -> Emission | None:
        step = indices[1] - indices[0]
        if abs(step) != 1 or any(b - a != step for a, b in itertools.pairwise(indices)):
            return None
        if max(indices) >= loop.count:
            return None
        if self._direction is None:
            self._direction = step < 0
        return Emission(loop, value, min(indices), len(indices), flip=(step < 0) != self._direction)

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
        if not self._loop.reverse or isinstance(source, Emission):
            return source
        return Stack(source.nodes[::-1]) if isinstance(source, Stack) else Draws(source.numbers[::-1])


def _same_spec(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype == y.dtype
