"""A captured graph as a sequence of nodes and loops: what rolling layers up makes, and what lowering them runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.fx.node import Node, map_arg

from xlatrain.bridge.loops.repetition import Kinds

Key: TypeAlias = Node
"""The first copy's node stands for its place in the body."""


@dataclass(frozen=True)
class BodyValue:
    """The result of an op of the same copy."""

    key: Key


@dataclass(frozen=True)
class Carried:
    """The ``index``-th carried value."""

    index: int


@dataclass(frozen=True)
class Scanned:
    """The slice of the ``index``-th scanned array that belongs to the copy at hand."""

    index: int


@dataclass(frozen=True)
class LoopConstant:
    """A value that is the same for every copy."""

    node: Node


Operand: TypeAlias = BodyValue | Carried | Scanned | LoopConstant


@dataclass(frozen=True)
class Stack:
    """A scanned array of the values of ``nodes``, one per copy, in the order of the array."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class ScanOutput:
    """A scanned array of ``count`` values that an earlier loop emitted, from position ``start`` on; ``flip`` reverses them."""

    loop: Loop
    value: Key | Carried
    start: int
    count: int
    flip: bool


@dataclass(frozen=True)
class Draws:
    """A scanned array of the numbers of random draws, in the order of the array."""

    numbers: tuple[int, ...]


Source: TypeAlias = Stack | ScanOutput | Draws


@dataclass(frozen=True)
class BodyOp:
    """An op of a loop's body.

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
        """The index of a copy in the arrays."""
        return self.count - 1 - copy if self.reverse else copy

    def emit(self, value: Key | Carried) -> None:
        if value not in self.emitted:
            self.emitted.append(value)

    def __str__(self) -> str:
        return f"{self.count} × {len(self.copies[0])} ops"


@dataclass(frozen=True)
class ScanSlot:
    """The slot of a node that was rolled up: ``position`` in copy ``copy`` of ``loop``."""

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
    places: Mapping[Node, ScanSlot]
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


def unrolled(graph: torch.fx.Graph) -> Schedule:
    """``graph`` as it is."""
    return Schedule(list(graph.nodes), {}, {}, ())


class Rolled:
    """The loops that are rolled up so far."""

    def __init__(self, alike: Kinds) -> None:
        self.alike = alike
        self.loops: list[Loop] = []
        self.places: dict[Node, ScanSlot] = {}
        self.same_as: dict[Node, Node] = {}

    def add(self, loop: Loop) -> None:
        self.loops.append(loop)
        for copy, nodes in enumerate(loop.copies):
            for position, node in enumerate(nodes):
                self.places[node] = ScanSlot(loop, copy, position)
        inside = {op.key for op in loop.body}
        for position, key in enumerate(loop.copies[0]):
            if key not in inside:  # hoisted
                for nodes in loop.copies:
                    self.same_as[nodes[position]] = key
                    del self.places[nodes[position]]
        for source in loop.scanned:
            if isinstance(source, ScanOutput):
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
        """Let loops emit the values that other code than the loops' scans needs of them."""
        for step in schedule.steps:
            for node in needed_by(step):
                place = self.places.get(node)
                if place is not None and not is_final_carry(place):
                    place.loop.emit(place.key)
        return schedule


def is_final_carry(place: ScanSlot) -> bool:
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
    outside = [node for op in loop.body for node in constants_of(op)]
    return [*outside, *(init for init, _ in loop.carries)]


def constants_of(op: BodyOp) -> list[Node]:
    """The nodes from outside whose values an op of a body uses as they are."""
    return [operand.node for operand in op.operands if isinstance(operand, LoopConstant)]


def operands_of(node: Node) -> list[Node]:
    """The nodes among an op's arguments, in the order of ``map_arg``, with repetitions."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs) if node.kwargs else node.args, found.append)
    return found
