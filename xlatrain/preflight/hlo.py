"""The text of a compiled program's HLO, parsed: its collectives and cycle estimates.

An instruction counts as often as it runs: those of a loop's body times the loop's trip count, where XLA knows it. XLA repeats a
collective in clones of a computation (asynchronous ones have a start, a done and a wrapped computation), with one
``channel_id``. On TPUs a reduce-scatter is a fusion named ``all-reduce-scatter`` around an all-reduce and a
slice.
A collective between slices is a pair of send and recv with ``_xla_megascale`` attributes: a device hands its part to the host,
which exchanges it with those of the other slices.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from xlatrain.preflight.costs import Costs, costs_of
from xlatrain.preflight.hlo_module import HloModule, Instruction

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"({_KINDS}|send)(-start)?")
_SLICE = 100_000
"""Between the numbers of the devices of one slice and those of the next."""


@dataclass(frozen=True)
class Collective:
    """A collective of the program.

    Attributes:
        kind: ``all-gather``, ``all-reduce``, ``reduce-scatter``, ``all-to-all``, ``collective-permute``.
        axes: the mesh axes that it runs along; ``("dcn",)`` between slices.
        group_size: devices that take part together; slices, between slices.
        count: how often it runs in a step.
        bytes: of one run, on one device: of the gathered result, or of what is reduced or exchanged.
        op: the operation of the user's program that it belongs to, where XLA says so.
        asynchronous: other work goes on meanwhile.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    bytes: int
    op: str = ""
    asynchronous: bool = False

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one run, on a ring."""
        share = (self.group_size - 1) / self.group_size
        return self.bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


class Hlo:
    """The text of a compiled program.

    Args:
        text: ``compiled.as_text()``.
        mesh: whose devices it runs on; partition ids count them in the mesh's order.
    """

    def __init__(self, text: str, mesh: Mesh) -> None:
        self.module = HloModule(text)
        self._mesh = mesh

    def collectives(self) -> list[Collective]:
        """Every collective, once for all its clones, which are in computations of their own."""
        found: dict[tuple[Any, ...], list[tuple[Collective, str]]] = defaultdict(list)
        for computation, instructions in self.module.computations.items():
            met: Counter[tuple[str, ...]] = Counter()
            for instruction in instructions.values():
                match = _COLLECTIVE.fullmatch(instruction.op)
                if match is None or (match[1] == "send" and "_xla_megascale" not in instruction.attributes):
                    continue
                read = self._between_slices if match[1] == "send" else self._inside
                one = read(instruction, computation)
                channel = re.search(r"channel_id=(\d+)", instruction.attributes)
                # Those that a shard_map asks for have one channel all together, and are told apart by where the code has them.
                key = (one.kind, channel[1], instruction.path) if channel else (computation, instruction.name)
                met[key] += 1
                found[*key, met[key]].append((one, computation))
        return [one for clones in found.values() for one in self._joined(clones)]

    def _joined(self, clones: Sequence[tuple[Collective, str]]) -> Iterator[Collective]:
        """Join the instructions of one collective: the copies that nothing goes on beside, and the others.

        A loop's first or last turn may stand outside of it: each copy runs. Of an asynchronous one in fusions only those that
        begin it count: its steps may lie in loops between begin and end. Where none is marked so, it runs as often as the least.
        """
        whole = [one for one, _ in clones if not one.asynchronous]
        begun = [one for one, name in clones if one.asynchronous and (name in self.module.scheduled or self._begins(name))]
        for copies in (whole, begun):
            if copies:
                yield replace(copies[0], count=sum(one.count for one in copies))
        if not whole and not begun:
            yield min((one for one, _ in clones), key=lambda one: one.count)

    def _begins(self, computation: str) -> bool:
        return any('"AsyncCollectiveStart"' in one.attributes for one in self.module.computations[computation].values())

    def _inside(self, instruction: Instruction, computation: str) -> Collective:
        """A collective inside of a slice."""
        start = instruction.op.endswith("-start")
        kind = instruction.op.removesuffix("-start")
        groups = list(_groups(instruction.attributes, self._mesh.devices.size))
        size = max(map(len, groups), default=1)
        sizes = [one.nbytes for one in instruction.arrays if one.dtype != "u32" or one.dims]  # without what accompanies them
        # A start gives (operands, results); the last half are results.
        if (start and instruction.result.startswith("((")) or (start and kind in ("all-gather", "collective-permute")):
            sizes = sizes[len(sizes) // 2 :] if kind == "all-gather" else sizes[:1]
        nbytes = sum(sizes)
        if kind == "reduce-scatter":
            nbytes *= size
        elif kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind = "reduce-scatter"
        return Collective(
            kind,
            self._axes(groups),
            size,
            self.module.runs[computation],
            int(nbytes),
            instruction.path,
            start or _is_asynchronous(computation, self.module.scheduled),
        )

    def _between_slices(self, instruction: Instruction, computation: str) -> Collective:
        """The collective that a send begins. Its kind is that of the transfer, and it gives a device's part."""
        told = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        kind = "one-to-one" if told is None else told[1].lower().replace("_", "-")
        kind = "collective-permute" if kind == "one-to-one" else kind
        slices = _slices(instruction.attributes)
        nbytes = instruction.arrays[0].nbytes * (slices if kind == "all-gather" else 1)
        return Collective(kind, ("dcn",), slices, self.module.runs[computation], int(nbytes), instruction.path, asynchronous=True)

    def _axes(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The axes along which members of a group differ; a permutation may leave some devices as they are."""
        shape = self._mesh.devices.shape
        members = np.array(groups if len(groups[0]) == 2 else groups[:1]) % self._mesh.devices.size
        positions = np.stack(np.unravel_index(members, shape))  # [axis, group, member]
        moves = (positions != positions[:, :, :1]).any(axis=(1, 2))
        return tuple(name for name, one in zip(self._mesh.axis_names, moves, strict=True) if one) or ("none",)

    def costs(self) -> Costs:
        """FLOPs, traffic and cycles by region."""
        return costs_of(self.module)


def _is_asynchronous(computation: str, scheduled: frozenset[str]) -> bool:
    """Whether other work goes on beside a collective: one inside of a fusion is a part of it, but for fused reduce-scatters."""
    return computation not in scheduled and "all-reduce-scatter" not in computation


def _slices(line: str) -> int:
    """The slices that take part together: ``"{1,2}x{0:3}"``, or groups of devices, numbered from 100,000 on in each slice."""
    target = re.search(r"_xla_megascale_target=\W*([\d,]+)", line)
    numbers = [int(number) for number in target[1].strip(",").split(",")] if target else []
    return len({number // _SLICE if number >= _SLICE else number for number in numbers}) or 1


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
