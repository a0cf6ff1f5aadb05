"""The text of a compiled program's HLO, parsed: its collectives and cycle estimates.

An instruction counts as often as it runs: those of a loop's body times the loop's trip count, where XLA knows it. XLA repeats a
collective in clones of a computation (asynchronous ones have a start, a done and a wrapped computation); what has one
``channel_id`` is one collective. On TPUs a reduce-scatter is a fusion named ``all-reduce-scatter`` around an all-reduce and a
slice.
Transfers between slices are pairs of send and recv with ``_xla_megascale`` attributes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax.sharding import Mesh

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+)$")
_COLLECTIVE = re.compile(rf" ({_KINDS}|send)(-start)?\(")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|async_execution_thread|called_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_UNKNOWN = 1 << 62
"""Cycles: where the compiler has no estimate it writes -1 without a sign."""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Collective:
    """A collective of the program.

    Attributes:
        kind: ``all-gather``, ``all-reduce``, ``reduce-scatter``, ``all-to-all``, ``collective-permute``; ``send`` between slices.
        axes: the mesh axes that it runs along; ``("dcn",)`` between slices.
        group_size: devices that take part together.
        count: how often it runs in a step.
        bytes: of one run, on one device: of the gathered result, or of what is reduced or exchanged.
        op: the operation of the user's program that it belongs to, where XLA says so.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    bytes: int
    op: str = ""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one run, on a ring."""
        share = (self.group_size - 1) / self.group_size
        return self.bytes * {"all-reduce": 2 * share, "collective-permute": 1.0, "send": 1.0}.get(self.kind, share)


class Hlo:
    """The text of a compiled program.

    Args:
        text: ``compiled.as_text()``.
        mesh: whose devices it runs on; partition ids count them in the mesh's order.
    """

    def __init__(self, text: str, mesh: Mesh) -> None:
        self._mesh = mesh
        self._computations: dict[str, list[str]] = {}
        self._entry = ""
        current: list[str] = []
        for line in text.splitlines():
            if line.startswith((" ", "\t")):
                current.append(line)
            elif found := _COMPUTATION.match(line):
                current = self._computations[found[2]] = []
                self._entry = found[2] if found[1] else self._entry

    @cached_property
    def _runs(self) -> dict[str, int]:
        """The number of times that each computation runs in one step."""
        runs: dict[str, int] = defaultdict(int)

        def visit(name: str, times: int) -> None:
            runs[name] += times
            for line in self._computations.get(name, ()):
                trips = self._trips(line) if " while(" in line else 1
                for called in _called(line):
                    if called in self._computations:
                        visit(called, times * trips)

        visit(self._entry, 1)
        return runs

    def _trips(self, line: str) -> int:
        """The number of times that the body of a ``while`` runs: XLA's, else the bound of a counter from 0; 1 if unknown."""
        if found := _TRIPS.search(line):
            return int(found[1])
        condition = re.search(r"condition=%?([\w.-]+)", line)
        text = "\n".join(self._computations.get(condition[1], ())) if condition else ""
        for called in _CALLED.findall(text):
            text += "\n".join(self._computations.get(called, ()))
        bounds = re.findall(r"= s32\[\]\S* constant\((\d+)\)", text)
        return int(bounds[0]) if len(set(bounds)) == 1 and "direction=LT" in text else 1

    def collectives(self) -> list[Collective]:
        """Every collective, once for all its clones."""
        found: dict[str, Collective] = {}
        for computation, lines in self._computations.items():
            for line in lines:
                instruction = _INSTRUCTION.match(line)
                if instruction is None:
                    continue
                match = _COLLECTIVE.search(line)
                if match is None or (match[1] == "send" and "_xla_megascale" not in line):
                    continue
                one = self._collective(match, instruction[2], computation)
                channel = re.search(r"channel_id=(\d+)", line)
                key = f"{one.kind} {channel[1]}" if channel else f"{computation} {instruction[1]}"
                if key not in found or found[key].count < one.count:
                    found[key] = one
        return list(found.values())

    def _collective(self, match: re.Match[str], text: str, computation: str) -> Collective:
        kind, line = match[1], text
        groups = [(0,)] if kind == "send" else list(_groups(line, self._mesh.devices.size))
        size = max(map(len, groups), default=1)
        result = line[: line.find(f" {kind}")]
        shapes = _shapes(result)
        # A start gives (operands, results); the last half are results.
        if (match[2] and result.startswith("((")) or (match[2] and kind in ("all-gather", "collective-permute")):
            shapes = shapes[len(shapes) // 2 :] if kind == "all-gather" else shapes[:1]
        if kind == "send":
            shapes = shapes[:1]
        nbytes = sum(shapes)
        if kind == "reduce-scatter":
            nbytes *= size
        elif kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind = "reduce-scatter"
        op = re.search(r'op_name="([^"]*)"', line)
        axes = ("dcn",) if kind == "send" else self._axes(groups)
        return Collective(
            kind, axes, size if kind != "send" else self._slices, self._runs[computation], int(nbytes), op[1] if op else ""
        )

    @property
    def _slices(self) -> int:
        return len({getattr(device, "slice_index", 0) or 0 for device in self._mesh.devices.flat})

    def _axes(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The axes along which members of a group differ; a permutation may leave some devices as they are."""
        shape = self._mesh.devices.shape
        members = np.array(groups if len(groups[0]) == 2 else groups[:1]) % self._mesh.devices.size
        positions = np.stack(np.unravel_index(members, shape))  # [axis, group, member]
        moves = (positions != positions[:, :, :1]).any(axis=(1, 2))
        return tuple(name for name, one in zip(self._mesh.axis_names, moves, strict=True) if one) or ("none",)

    def cycles(self) -> int:
        """The compiler's own estimates, added up. Only good for comparing programs with each other."""
        total = 0
        for computation, lines in self._computations.items():
            own = [int(found[1]) for line in lines if (found := _CYCLES.search(line))]
            total += sum(one for one in own if one < _UNKNOWN) * self._runs.get(computation, 0)
        return total


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for listed in _BRANCHES.findall(line):
        yield from re.findall(r"[\w.-]+", listed)


def _shapes(text: str) -> list[float]:
    """Bytes of each array in an HLO type; tokens and the scalars that accompany asynchronous operations count nothing."""
    sizes = []
    for dtype, dims in re.findall(r"\b([a-z]+[0-9]*(?:e\w+)?)\[([\d,]*)\]", text):
        if dtype == "u32" and not dims:
            continue
        width = _BYTES.get(dtype)
        if width is None:
            digits = re.match(r"[a-z]+(\d+)", dtype)
            width = int(digits[1]) / 8 if digits else 0
        sizes.append(width * math.prod(int(dim) for dim in dims.split(",") if dim))
    return sizes


def _groups(line: str, devices: int) -> Iterator[tuple[int, ...]]:
    """The groups of devices: pairs, ``{{0,1},{2,3}}``, ``[2,2]<=[4]``, ``[2,2]<=[2,2]T(1,0)``, or axes of a mesh."""
    if found := re.search(r"source_target_pairs=\{(\{.*?\})\}", line):
        yield from (tuple(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", found[1]))
    elif found := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line):
        yield from (tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1]))
    elif found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, iota = (tuple(map(int, found[i].split(","))) for i in (1, 2))
        ids = np.arange(math.prod(iota)).reshape(iota)
        if found[3]:
            ids = ids.transpose(tuple(map(int, found[3].split(","))))
        yield from (tuple(map(int, group)) for group in ids.reshape(shape))
    elif found := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}", line
    ):
        yield from _groups_of_axes(*found.groups())
    else:
        yield tuple(range(devices))


def _groups_of_axes(mesh: str, iota: str | None, order: str | None, axes: str) -> Iterator[tuple[int, ...]]:
    """Yield the groups over ``axes`` of ``mesh``: ``'a','b':(1)2`` of ``'a'=2,'b'=4`` over ``[2,2,2]T(1,0,2)``.

    ``(1)2`` is a part of an axis.
    """
    sizes = [int(size) for size in re.findall(r"=(\d+)", mesh)]
    names = re.findall(r"'([^']+)'", mesh)
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    dims = [int(dim) for dim in (iota or str(math.prod(sizes))).split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    if order:
        ids = ids.transpose([int(dim) for dim in order.split(",")])
    shape: list[int] = []
    grouped: list[int] = []
    for name, size in zip(names, sizes, strict=True):
        mine = sorted((int(before), int(part)) if part else (1, size) for one, before, part in parts if one == name)
        done = 1
        for before, part in mine:
            shape.append(before // done)
            grouped.append(len(shape))
            shape.append(part)
            done = before * part
        shape.append(size // done)
    ids = np.moveaxis(ids.reshape(shape), grouped, range(-len(grouped), 0))
    yield from (tuple(map(int, group)) for group in ids.reshape(-1, math.prod(shape[dim] for dim in grouped)))
