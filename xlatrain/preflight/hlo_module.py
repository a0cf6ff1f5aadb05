"""The text of a compiled program, taken apart: computations, instructions, and how often each runs in a step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "token": 0}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+)$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\w+)?)\[([\d,]*)\](\{[^{}]*\})?")
_CALLED = re.compile(r"\b(?:calls|body|condition|to_apply|called_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Array:
    """Array in an instruction's result.

    Attributes:
        dtype: as HLO writes it.
        dims: of one device.
        space: 0 for HBM; on TPUs 1 is VMEM.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def nbytes(self) -> float:
        """The size in bytes."""
        width = _BYTES.get(self.dtype)
        if width is None:
            digits = re.match(r"[a-z]+(\d+)", self.dtype)
            width = int(digits[1]) / 8 if digits else 0
        return width * math.prod(self.dims)


@dataclass(frozen=True)
class Instruction:
    """An instruction.

    Attributes:
        name: unique in its computation.
        op: ``fusion``, ``while``, ``all-gather-start``, ….
        result: its type, as text.
        operands: names of instructions of the same computation.
        attributes: the rest of its line.
        is_root: its result is the computation's.
    """

    name: str
    op: str
    result: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> list[Array]:
        """The arrays of its result."""
        return arrays_of(self.result)

    @property
    def path(self) -> str:
        """The operation of the user's program that it belongs to, where XLA says so."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def called(self) -> Iterator[str]:
        """Names of the computations that it calls."""
        yield from _CALLED.findall(self.attributes)
        for listed in _BRANCHES.findall(self.attributes):
            yield from re.findall(r"[\w.-]+", listed)


def arrays_of(text: str) -> list[Array]:
    """The arrays of an HLO type."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        found.append(Array(dtype, tuple(int(dim) for dim in dims.split(",") if dim), int(space[1]) if space else 0))
    return found


Computation = dict[str, Instruction]


class HloModule:
    """A compiled program's text.

    Args:
        text: ``compiled.as_text()``.

    Attributes:
        computations: by name; instructions by name, in their order.
        entry: the name of the one that is the program.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        for line in text.splitlines():
            if line.startswith((" ", "\t")):
                if (instruction := _parsed(line)) is not None:
                    current[instruction.name] = instruction
            elif found := _COMPUTATION.match(line):
                current = self.computations[found[2]] = {}
                self.entry = found[2] if found[1] else self.entry

    @cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation runs in one step."""
        runs: dict[str, int] = defaultdict(int)

        def visit(name: str, times: int) -> None:
            runs[name] += times
            for instruction in self.computations.get(name, {}).values():
                trips = self.trips(instruction) if instruction.op == "while" else 1
                for called in instruction.called():
                    if called in self.computations:
                        visit(called, times * trips)

        visit(self.entry, 1)
        return runs

    @cached_property
    def scheduled(self) -> frozenset[str]:
        """The computations whose instructions run one after the other: the program, bodies of loops and branches, no fusions."""
        found: set[str] = set()
        todo = [self.entry]
        while todo:
            name = todo.pop()
            if name in found or name not in self.computations:
                continue
            found.add(name)
            for instruction in self.computations[name].values():
                if instruction.op in ("while", "conditional", "call"):
                    condition = re.search(r"\bcondition=%?([\w.-]+)", instruction.attributes)
                    todo += [called for called in instruction.called() if condition is None or called != condition[1]]
        return frozenset(found)

    def trips(self, loop: Instruction) -> int:
        """How often the body of a ``while`` runs: what XLA says, else its counter's bound over its increment; 1 if unknown."""
        if found := _TRIPS.search(loop.attributes):
            return int(found[1])
        names = {key: re.search(rf"\b{key}=%?([\w.-]+)", loop.attributes) for key in ("condition", "body")}
        if any(found is None for found in names.values()):
            return 1
        condition, body = (self.computations.get(found[1], {}) for found in names.values() if found)
        parts = [condition, *(self.computations.get(name, {}) for one in condition.values() for name in one.called())]
        bounds = [number for part in parts for one in part.values() if (number := _whole_number(one)) is not None]
        if not bounds:
            return 1
        return max(1, math.ceil(max(bounds) / self._increment(condition, body)))

    def _increment(self, condition: Computation, body: Computation) -> int:
        """By how much a loop's counter grows: the part of its state that its condition reads."""
        root = next((one for one in body.values() if one.is_root), None)
        read = [
            int(found[1])
            for one in condition.values()
            if one.op == "get-tuple-element" and re.match(r"[su]32\[\]", one.result)
            if (found := re.search(r"\bindex=(\d+)", one.attributes))
        ]
        if root is None or not read or read[0] >= len(root.operands):
            return 1
        counter = body.get(root.operands[read[0]])
        while counter is not None and counter.op in ("copy", "bitcast"):
            counter = body.get(counter.operands[0])
        if counter is None or counter.op != "add":
            return 1
        steps = [_whole_number(body[name]) for name in counter.operands if name in body]
        return next((abs(step) for step in steps if step), 1)


def _whole_number(instruction: Instruction) -> int | None:
    """The value of a constant counter."""
    if instruction.op != "constant" or not re.match(r"[su]32\[\]", instruction.result):
        return None
    found = re.search(r"-?\d+", instruction.attributes)
    return int(found[0]) if found else None


def _parsed(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    result, rest = _split(found[2])
    op = re.match(r"[\w-]+", rest)
    if op is None:
        return None
    inside, after = _split(rest[op.end() :])
    if op[0] in ("constant", "parameter"):
        return Instruction(found[1], op[0], result, (), f"{inside}{after}", line.lstrip().startswith("ROOT"))
    names = tuple(one.split()[-1].lstrip("%") for one in _listed(inside[1:-1]) if one.split())
    return Instruction(found[1], op[0], result, names, after, line.lstrip().startswith("ROOT"))


def _split(text: str) -> tuple[str, str]:
    """Split off the first parentheses with what is in them, or the first word."""
    if not text.startswith("("):
        first, _, rest = text.partition(" ")
        return first, rest.lstrip()
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[: i + 1], text[i + 1 :].lstrip()
    return text, ""


def _listed(text: str) -> Iterator[str]:
    """The parts of a list, without comments."""
    depth, start = 0, 0
    text = re.sub(r"/\*.*?\*/", "", text)
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            yield text[start:i]
            start = i + 1
    yield text[start:]
