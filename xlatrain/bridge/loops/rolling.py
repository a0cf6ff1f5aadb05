"""Roll the repeated layers of a captured graph up into loops: lowered and compiled once, run by ``lax.scan``.

The graph is pure and complete, forward and backward pass, so nothing has to be assumed of the user's Python: copies of a run
(:mod:`xlatrain.bridge.loops.repetition`) become a loop exactly if each uses its own results, results of the copy before it (these
are carried), and values from outside, at the same places. Values from outside that differ from copy to copy are scanned over:

- parameters are stacked;
- what the forward loop saved for the backward loop is emitted by the one and scanned by the other, in reverse;
- views of either are taken again inside of the loop that needs them, instead of being saved;
- numbers of random draws are scanned, so that every layer draws what it would have drawn.

What no operand of which differs between copies is computed once, before the loop.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.fx.node import Node

from xlatrain.bridge.graph_nodes import op_name
from xlatrain.bridge.loops.loop_builder import LoopBuilder, Unrollable
from xlatrain.bridge.loops.repetition import Kinds, Run, longest_run
from xlatrain.bridge.loops.schedule import Loop, Rolled, Schedule, needed_by, unrolled

# fmt: off
_HEAVY = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "attention", "attention_backward", "banded_attention",
    "banded_attention_backward", "grouped_mm", "eight_bit_product", "recurrence", "recurrence_backward",
))
# fmt: on
_ATTEMPTS = 8
_PHASES = 16
_SCORED_COPIES = 3


ENVIRONMENT = "XLATRAIN_ROLL_LAYERS"


def copies_to_roll(*, offloading: bool = False) -> int:
    """The number of copies from which layers are rolled up: 16, or the environment variable ``XLATRAIN_ROLL_LAYERS``.

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


def roll(graph: torch.fx.Graph, at_least: int) -> Schedule:
    """Roll up what repeats at least ``at_least`` times in ``graph``, which is pure."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    alike = Kinds()
    rolled = Rolled(alike)
    refused: list[str] = []
    runs = _runs(calls, alike.numbers(calls), at_least)
    for run in sorted(runs, key=lambda run: run.start):  # a loop may scan what an earlier one emitted
        try:
            rolled.add(_best_phase(calls[run.stretch], run, rolled))
        except Unrollable as error:
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
    """The stretches that repeat and are worth a loop, those that save most first; they do not overlap."""
    for _ in range(_ATTEMPTS):
        run = longest_run(numbers, at_least)
        if run is None:
            return
        if any(op_name(node) in _HEAVY for node in calls[run.stretch][: run.period]):
            yield run
        numbers[run.stretch] = [-1 - i for i in range(*run.stretch.indices(len(calls)))]


def _best_phase(nodes: Sequence[Node], run: Run, rolled: Rolled) -> Loop:
    """The loop that starts where least has to be carried and scanned: a run may be longer than its copies."""
    phases = _cuts(nodes, run)
    if len(phases) == 1:
        return _loop(_copies(nodes, 0, run.period, run.count), rolled)
    scores: dict[int, int] = {}
    problem = Unrollable("no copies")
    for phase in phases:
        try:
            loop = LoopBuilder(_copies(nodes, phase, run.period, min(run.count, _SCORED_COPIES)), rolled).build()
            scores[phase] = len(loop.carries) * 2 + len(loop.scanned)
        except Unrollable as error:
            problem = error
    if not scores:
        raise problem
    best = min(scores, key=lambda phase: scores[phase])
    return _loop(_copies(nodes, best, run.period, run.count), rolled)


def _cuts(nodes: Sequence[Node], run: Run) -> list[int]:
    """The phases at which a copy passes the fewest bytes on to the next: between two layers, not inside of one."""
    part = nodes[: _SCORED_COPIES * run.period + run.slack]
    place = {node: i for i, node in enumerate(part)}
    change = [0] * (len(part) + 1)
    for i, node in enumerate(part):
        last = max((place[user] for user in node.users if user in place), default=i)
        value = node.meta.get("val")
        if last > i and isinstance(value, torch.Tensor):
            change[i + 1] += value.numel() * value.element_size()
            change[last + 1] -= value.numel() * value.element_size()
    passed = list(itertools.accumulate(change))
    return sorted(range(run.slack + 1), key=lambda phase: passed[run.period + phase])[:_PHASES]


def _loop(copies: list[Sequence[Node]], rolled: Rolled) -> Loop:
    """The loop of all copies; or of all but the first or last one, where what an earlier loop saved would be copied otherwise."""
    builder = LoopBuilder(copies, rolled)
    loop = builder.build()
    for fewer in (copies[:-1], copies[1:]) if builder.restacks and len(copies) > _SCORED_COPIES else ():
        with contextlib.suppress(Unrollable):
            shorter = LoopBuilder(fewer, rolled)
            found = shorter.build()
            if not shorter.restacks:
                return found
    return loop


def _copies(nodes: Sequence[Node], phase: int, period: int, count: int) -> list[Sequence[Node]]:
    return [nodes[phase + k * period : phase + (k + 1) * period] for k in range(count)]
