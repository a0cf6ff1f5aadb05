"""Which loops of a schedule run on the stages of a mesh, and their bodies for a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from xlatrain.bridge.loops.row_rules import WHOLE, Given, Mixes, OpForRows, Part, Rows, Summed, part_of
from xlatrain.bridge.loops.schedule import (
    BodyOp,
    BodyValue,
    Carried,
    Key,
    Loop,
    Operand,
    Scanned,
    ScanOutput,
    Schedule,
)
from xlatrain.mesh.pipelining import Pipelining


@dataclass(frozen=True)
class StagedOp:
    """An op of a loop's body for a microbatch.

    Attributes:
        op: as the loop has it, with a node for a microbatch.
        original: the op for all rows.
        cuts: of each operand how it is cut for a microbatch; None: taken as it is.
    """

    op: BodyOp
    original: Node
    cuts: tuple[Rows | None, ...]


@dataclass(frozen=True, eq=False)
class StagedLoop:
    """A loop that runs on stages.

    Attributes:
        loop: the loop.
        body: for a microbatch.
        parts: of what the loop emits where rows are.
        cut_sources: of what it scans whether that is cut into microbatches.
        microbatches, groups: how rows are cut, see :class:`~xlatrain.mesh.pipelining.Pipelining`.
    """

    loop: Loop
    body: Sequence[StagedOp]
    parts: Mapping[Key | Carried, Part]
    cut_sources: Sequence[bool]
    microbatches: int
    groups: int


@dataclass(frozen=True)
class Staged:
    """A schedule on a mesh with stages.

    Attributes:
        schedule: the schedule.
        pipelining: the pipeline.
        loops: those that run on stages.
        refused: other loops, and why.
    """

    schedule: Schedule
    pipelining: Pipelining
    loops: dict[Loop, StagedLoop] = field(default_factory=dict)
    refused: dict[Loop, str] = field(default_factory=dict)

    @property
    def ops(self) -> list[StagedOp]:
        """The ops of all bodies on stages."""
        return [op for loop in self.loops.values() for op in loop.body]

    @property
    def problem(self) -> str:
        """Why the longest loop does not run on stages; empty if it does."""
        if not self.schedule.loops:
            why = f" ({'; '.join(self.schedule.refused)})" if self.schedule.refused else ""
            return f"it has no {self.pipelining.chunks} or more equal layers, each on the result of the one before{why}"
        longest = max(self.schedule.loops, key=lambda loop: loop.count * len(loop.copies[0]))
        return next(iter(self.refused.values())) if longest in self.refused else ""  # the first: a backward loop may follow it

    def stacked_inputs(self) -> list[tuple[int, ...]]:
        """The inputs of :meth:`Schedule.stacked_inputs`, in the order in which stages have their layers."""
        sizes = {loop.count for loop in self.loops}
        order = {size: self.pipelining.order(size) for size in sizes}
        return [
            tuple(stack[layer] for layer in order.get(len(stack), range(len(stack)))) for stack in self.schedule.stacked_inputs()
        ]

    def in_words(self) -> list[str]:
        """A sentence for each loop: how it runs on stages, or why not."""
        pipelining = self.pipelining
        told = []
        for loop in self.schedule.loops:
            staged = self.loops.get(loop)
            if staged is None:
                told.append(f"{loop}, not on stages: {self.refused[loop]}")
                continue
            rounds = f" in {pipelining.rounds} rounds" if pipelining.rounds > 1 else ""
            told.append(
                f"{loop}, on {pipelining.stages} stages{rounds}: {staged.microbatches} microbatches, "
                f"{pipelining.bubble(staged.microbatches):.1%} of the time waiting"
            )
        return told


def stage(schedule: Schedule, pipelining: Pipelining) -> Staged:
    """Find the loops of a schedule that can run on stages."""
    found = Staged(schedule, pipelining)
    for loop in schedule.loops:
        try:
            found.loops[loop] = _staged(loop, found)
        except Mixes as error:
            found.refused[loop] = str(error)
    return found


def _staged(loop: Loop, found: Staged) -> StagedLoop:
    pipelining = found.pipelining
    if loop.count % pipelining.chunks:
        raise Mixes(
            f"{loop.count} layers do not divide into {pipelining.stages} stages"
            + (f" of {pipelining.rounds} rounds" if pipelining.rounds > 1 else "")
        )
    if not loop.carries:
        raise Mixes("no layer takes the result of the one before")
    inits = [init.meta["val"] for init, _ in loop.carries]
    rows = {value.shape[0] if value.ndim else 1 for value in inits}
    if len(rows) > 1 or not all(value.ndim for value in inits):
        raise Mixes(
            f"layers hand on {', '.join(str(tuple(value.shape)) for value in inits)}, which do not begin with one number of rows"
        )
    count = pipelining.microbatches_of(rows.pop())
    groups = pipelining.groups(inits[0].shape[0], count)
    parts: dict[Key, Any] = {}

    def part(operand: Operand) -> Any:
        if isinstance(operand, BodyValue):
            return parts[operand.key]
        if isinstance(operand, Carried):
            return Rows(0)
        if isinstance(operand, Scanned):
            return _part_of_source(loop.scanned[operand.index], found, count)
        return WHOLE

    body = []
    for op in loop.body:
        made, where = _for_microbatch(op, [part(operand) for operand in op.operands], count, groups * count)
        parts[op.key] = where
        body.append(made)
    for _, key in loop.carries:
        if parts[key] != Rows(0):
            raise Mixes(f"{key.name}, which a layer hands on, has no rows of its own")
    emitted: dict[Key | Carried, Part] = {e: Rows(0) if isinstance(e, Carried) else parts[e] for e in loop.emitted}
    cut = [isinstance(_part_of_source(source, found, count), Rows) for source in loop.scanned]
    return StagedLoop(loop, body, emitted, cut, count, groups)


def _part_of_source(source: Any, found: Staged, microbatches: int) -> Part:
    if not isinstance(source, ScanOutput) or (earlier := found.loops.get(source.loop)) is None:
        return WHOLE
    if source.count != source.loop.count or source.flip or earlier.microbatches != microbatches:
        raise Mixes("it takes what other layers than its own have saved")
    part = earlier.parts[source.value]
    return WHOLE if isinstance(part, Summed) else part


def _for_microbatch(op: BodyOp, parts: Sequence[Any], microbatches: int, unit: int) -> tuple[StagedOp, Part | tuple[Part, ...]]:
    """An op of a body for a microbatch, and where the rows of its results are."""
    node = op.node
    numbers = iter(range(len(parts)))
    shapes: list[Any] = []

    def given(one: Node) -> Any:
        value = one.meta.get("val")
        shapes.append(value)
        return Given(next(numbers), parts[len(shapes) - 1], tuple(value.shape) if isinstance(value, torch.Tensor) else ())

    args, kwargs = map_arg((node.args, node.kwargs), given)
    if any(isinstance(one, Given) and one.part != WHOLE for one in kwargs.values()):
        raise Mixes(f"{node.target} is given a tensor by name")
    rows = OpForRows(node, [list(one) if isinstance(one, tuple | list) else one for one in args], unit, microbatches)
    where = part_of(rows)
    made = _node(node, rows, kwargs, shapes, where, microbatches)
    cuts = tuple(rows.cuts.get(i) for i in range(len(parts)))
    return StagedOp(BodyOp(made, op.key, op.operands, op.draw), node, cuts), where


def _node(node: Node, rows: OpForRows, kwargs: Any, values: Sequence[Any], where: Any, microbatches: int) -> Node:
    """The op in a graph of its own, with the shapes of a microbatch."""
    graph = torch.fx.Graph()
    operands = []
    for value in values:
        operands.append(graph.placeholder("given"))
        operands[-1].meta["val"] = value
    args = _with(rows.args, operands)
    made = graph.call_function(rows.target, tuple(args), _with(kwargs, operands))
    made.meta = {**node.meta, "val": _of_microbatch(node.meta.get("val"), where, microbatches)}
    return made


def _with(value: Any, operands: Sequence[Node]) -> Any:
    if isinstance(value, Given):
        return operands[value.index]
    if isinstance(value, tuple | list):
        return [_with(one, operands) for one in value]
    if isinstance(value, Mapping):
        return {name: _with(one, operands) for name, one in value.items()}
    return value


def _of_microbatch(value: Any, where: Any, microbatches: int) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_of_microbatch(one, part, microbatches) for one, part in zip(value, where, strict=True))
    if not isinstance(value, torch.Tensor) or not isinstance(where, Rows):
        return value
    shape = list(value.shape)
    shape[where.dim] //= microbatches
    return torch.empty(shape, dtype=value.dtype, device="meta")
