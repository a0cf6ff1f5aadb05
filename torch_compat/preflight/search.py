"""The search for the mesh, rules, batch and recomputation that suit a run best: compiled, in a time budget, resumable."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from torch_compat.preflight.api import Examiner
from torch_compat.preflight.errors import PreflightError
from torch_compat.preflight.progress import Bar
from torch_compat.preflight.variation import NamedRules, Variation, checkpointable, repeated_layers
from xlatrain.bridge.tensor_parallel import own_plan
from xlatrain.preflight import Topology
from xlatrain.preflight.report import Report

FILE = "search.json"
_STATE_SHARE = 0.9  # of the chip's memory; a state that takes more leaves no room for a step
_TENSOR_SIZES = (2, 4, 8)  # wider ones leave a torus' fast links


class Search:
    """The search among other ways to run the same optimizer step.

    Meshes are every ``data`` × ``fsdp``, with a ``tensor`` axis too where the module's models know how to split themselves, other
    axes as they are; each with the strategy's sharding rules and with the others that are given, with the batch as it is, a half
    and a quarter of it, and with recomputation where there are layers. What cannot hold even parameters, gradients and optimizer
    state is not compiled. A candidate is compiled with its full depth: repeated layers are a loop, which costs the compiler what
    one layer costs.

    Args:
        first: of the run as it is.
        rules: name → pairs of a glob and a ``PartitionSpec``.
        folder: results are kept in its ``search.json``, and found there by the next search.
    """

    def __init__(
        self,
        examiner: Examiner,
        topology: Topology,
        first: Report,
        rules: Mapping[str, Sequence[tuple[str, PartitionSpec]]],
        folder: Path | None,
    ) -> None:
        self._examiner, self._topology, self._first, self._folder = examiner, topology, first, folder
        self._candidates = list(_candidates(examiner, topology, first, rules))
        self._kept = _read(folder, _identity(topology, first))

    def run(self, budget_s: float) -> list[dict[str, Any]]:
        """Compile candidates until the time is over.

        Args:
            budget_s: no new candidate is begun after so many seconds.

        Returns:
            ``{"what", "fits", "total", "rows_per_second_per_chip", "step_seconds", "reason"}`` of each: those that fit by
            throughput, then the others.
        """
        end = time.monotonic() + budget_s
        bar = Bar(len(self._candidates), budget_s, self._examiner.progress)
        told, self._examiner.progress = self._examiner.progress, bar.tell
        try:
            self._run(bar, end)
        finally:
            self._examiner.progress = told
            bar.end(left=sum(str(one) not in self._kept for one in self._candidates))
            self._write()
        return self._ranked()

    def _run(self, bar: Bar, end: float) -> None:
        for number, variation in enumerate(self._candidates, start=1):
            if str(variation) in self._kept:
                continue
            if self._too_large(variation):
                continue
            if time.monotonic() > end:
                break
            bar.at(number, str(variation))
            self._kept[str(variation)] = self._compiled(variation)
            self._write()

    def _write(self) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{FILE}"
        kept = {**_identity(self._topology, self._first), "candidates": list(self._kept.values())}
        temporary.write_text(json.dumps(kept, indent=1) + "\n")
        temporary.replace(self._folder / FILE)

    def best(self) -> Report | None:
        """The report of the best candidate, compiled with everything that belongs to a report; None where nothing fits."""
        ranked = self._ranked()
        found = next((one for one in self._candidates if ranked and ranked[0]["fits"] and str(one) == ranked[0]["what"]), None)
        if found is None:
            return None
        return self._first if self._is_first(found) else self._examiner.examine(self._topology, found)

    def _ranked(self) -> list[dict[str, Any]]:
        def rank(one: dict[str, Any]) -> tuple[bool, float, int]:
            return not one["fits"], -(one["rows_per_second_per_chip"] or 0), one["total"]

        return sorted(self._kept.values(), key=rank)

    def _too_large(self, variation: Variation) -> bool:
        """Whether its state alone leaves no room; then that is its result."""
        needed = _state_bytes(self._first, variation)
        if self._topology.chip is None or needed <= _STATE_SHARE * self._first.bytes_per_chip["hbm"]:
            return False
        self._kept[str(variation)] = _entry(variation, False, needed, None, "the state alone is too large; not compiled")
        return True

    def _is_first(self, variation: Variation) -> bool:
        """Whether a candidate is the run as it is, which has been compiled."""
        return variation == Variation(axes=tuple(self._first.mesh.items()))

    def _compiled(self, variation: Variation) -> dict[str, Any]:
        try:
            found = (
                self._first if self._is_first(variation) else self._examiner.examine(self._topology, variation, evaluation=False)
            )
        except Exception as error:  # a candidate that the module does not take is a finding too
            return _entry(variation, False, 0, None, f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300])
        reason = "" if found.fits else f"{found.missing:,} bytes too much"
        return _entry(variation, found.fits, found.bytes_per_chip["total"], found, reason)


def _candidates(
    examiner: Examiner, topology: Topology, first: Report, rules: Mapping[str, Sequence[tuple[str, PartitionSpec]]]
) -> Iterator[Variation]:
    rows = first.settings["global_batch_rows"]
    recomputes = checkpointable(examiner.module) or (not first.settings["layout"]["remat"] and repeated_layers(examiner.module))
    for remat in (False, True) if recomputes else (False,):
        for divide in (1, 2, 4):
            for axes in _meshes(examiner, first, topology):
                if rows % divide or rows // divide < math.prod(dict(axes).get(axis, 1) for axis in ("data", "fsdp")):
                    continue
                for named in _rules(first, rules):
                    yield Variation(axes=axes, divide=divide, remat=remat, rules=named)


def _rules(first: Report, given: Mapping[str, Sequence[tuple[str, PartitionSpec]]]) -> Iterator[NamedRules | None]:
    """The rules to try: the strategy's own; the automatic rule, where it has others; those that the caller gives."""
    yield None
    if first.settings["layout"]["rules"] or first.settings["layout"]["logical_axes"]:
        yield NamedRules("automatic")
    for name, rules in given.items():
        yield NamedRules(name, tuple(rules))


def _meshes(examiner: Examiner, first: Report, topology: Topology) -> Iterator[tuple[tuple[str, int], ...]]:
    """Splits of the devices; ``data`` is a multiple of the slices, so that ``fsdp`` and ``tensor`` stay inside one."""
    devices = topology.chips * topology.devices_per_chip
    others = tuple((axis, size) for axis, size in first.mesh.items() if axis not in ("data", "fsdp"))
    batch_devices = devices // math.prod(size for _, size in others)
    yield from _batch_meshes(batch_devices, topology.num_slices, others)
    if others or not own_plan(examiner.module):
        return
    for size in _TENSOR_SIZES:
        if devices % (size * topology.num_slices) == 0:
            yield from _batch_meshes(devices // size, topology.num_slices, (("tensor", size),))


def _batch_meshes(devices: int, slices: int, others: tuple[tuple[str, int], ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    for data in range(slices, devices + 1, slices):
        if devices % data == 0:
            yield (("data", data), ("fsdp", devices // data), *others)


def _state_bytes(first: Report, variation: Variation) -> int:
    """Parameters, gradients and optimizer state of a chip with this mesh, if all were split over ``fsdp`` and ``tensor``."""
    parts = first.bytes_per_chip
    held = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    before, now = (mesh.get("fsdp", 1) * mesh.get("tensor", 1) for mesh in (first.mesh, dict(variation.axes or ())))
    replicated = 0 if before == 1 else first.replicated_bytes
    return replicated + max(held - replicated, 0) * before // now


def _entry(variation: Variation, fits: bool, total: int, found: Report | None, reason: str) -> dict[str, Any]:
    roofline = None if found is None else found.estimate
    rate = (
        None if roofline is None or found is None or roofline.rows_per_second is None else roofline.rows_per_second / found.chips
    )
    return {
        "what": str(variation),
        "fits": fits,
        "total": total,
        "rows_per_second_per_chip": rate,
        "step_seconds": None if roofline is None else roofline.step_seconds,
        "reason": reason,
    }


def _identity(topology: Topology, first: Report) -> dict[str, Any]:
    """The settings in which results must agree to be of the same search."""
    settings = {key: first.settings[key] for key in ("precision", "global_batch_rows", "accumulate_grad_batches")}
    return {"topology": topology.title, "parameters": first.parameters, **settings}


def _read(folder: Path | None, identity: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    path = None if folder is None else folder / FILE
    if path is None or not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text())
        for key, value in identity.items():
            if kept[key] != value:
                raise PreflightError(f"{path} holds a search for {key} {kept[key]}, not {value}; choose another --output")
        return {one["what"]: one for one in kept["candidates"]}
    except (ValueError, KeyError, TypeError) as error:
        raise PreflightError(f"{path} is not a search of preflight ({error!r}); delete it, or choose another --output") from error
