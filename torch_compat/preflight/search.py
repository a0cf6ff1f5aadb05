"""Which mesh, batch and recomputation suit a run and a topology best: compiled, within a time budget, resumable."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_compat.preflight.api import Examiner
from torch_compat.preflight.errors import PreflightError
from torch_compat.preflight.variation import Variation, checkpointable
from xlatrain.preflight import Topology
from xlatrain.preflight.report import Report

FILE = "search.json"
_STATE_SHARE = 0.9  # of the chip's memory; a state that takes more leaves no room for a step


def search(
    examiner: Examiner, topology: Topology, first: Report, *, budget_s: float, folder: Path | None
) -> list[dict[str, Any]]:
    """Compile other ways to run the same optimizer step, until the time is over.

    Meshes are every ``data`` × ``fsdp``, other axes as they are; each with the batch as it is, a half and a quarter of it, and
    with gradient checkpointing where the module knows it. What cannot hold even parameters, gradients and
    optimizer state is not compiled. Results are kept in ``search.json`` of the folder, and found there by the next search.

    Args:
        first: of the run as it is.
        budget_s: no new candidate is begun after so many seconds.

    Returns:
        ``{"what", "fits", "total", "rows_per_second_per_chip", "step_seconds", "reason"}`` of each: those that fit by throughput,
        then the others.
    """
    kept = _read(folder, topology)
    end = time.monotonic() + budget_s
    candidates = list(_candidates(examiner, topology, first))
    for number, variation in enumerate(candidates, start=1):
        if str(variation) in kept:
            continue
        needed = _state_bytes(first, variation)
        if topology.chip is not None and needed > _STATE_SHARE * first.bytes_per_chip["hbm"]:
            kept[str(variation)] = _entry(variation, False, needed, None, "the state alone is too large; not compiled")
            continue
        if time.monotonic() > end:
            break
        examiner.progress(f"candidate {number} of {len(candidates)}: {variation}")
        kept[str(variation)] = _compiled(examiner, topology, variation)
        _write(folder, topology, kept)
    _write(folder, topology, kept)
    return sorted(kept.values(), key=lambda one: (not one["fits"], -(one["rows_per_second_per_chip"] or 0), one["total"]))


def winner(examiner: Examiner, topology: Topology, first: Report) -> Variation | None:
    """What the search of ``first`` ranks first; None where nothing fits."""
    best = first.search[0] if first.search and first.search[0]["fits"] else None
    found = _candidates(examiner, topology, first)
    return None if best is None else next((one for one in found if str(one) == best["what"]), None)


def _candidates(examiner: Examiner, topology: Topology, first: Report) -> Iterator[Variation]:
    rows = first.settings["global_batch_rows"]
    for remat in (False, True) if checkpointable(examiner.module) else (False,):
        for divide in (1, 2, 4):
            for axes in _meshes(first, topology):
                if rows % divide == 0 and rows // divide >= math.prod(dict(axes).get(axis, 1) for axis in ("data", "fsdp")):
                    yield Variation(axes=axes, divide=divide, remat=remat)


def _meshes(first: Report, topology: Topology) -> Iterator[tuple[tuple[str, int], ...]]:
    """Splits of the batch axes; ``data`` is a multiple of the slices, so that ``fsdp`` stays inside one."""
    others = tuple((axis, size) for axis, size in first.mesh.items() if axis not in ("data", "fsdp"))
    devices = topology.chips * topology.devices_per_chip // math.prod(size for _, size in others)
    for data in range(topology.num_slices, devices + 1, topology.num_slices):
        if devices % data == 0:
            yield (("data", data), ("fsdp", devices // data), *others)


def _state_bytes(first: Report, variation: Variation) -> int:
    """Parameters, gradients and optimizer state of a chip with this mesh, if all of it were split over ``fsdp``."""
    parts = first.bytes_per_chip
    held = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    before, now = first.mesh.get("fsdp", 1), dict(variation.axes or ()).get("fsdp", 1)
    replicated = 0 if before == 1 else first.replicated_bytes
    return replicated + max(held - replicated, 0) * before // now


def _compiled(examiner: Examiner, topology: Topology, variation: Variation) -> dict[str, Any]:
    try:
        found = examiner.examine(topology, variation, evaluation=False)
    except Exception as error:  # a candidate that the module does not take is a finding too
        return _entry(variation, False, 0, None, f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300])
    reason = "" if found.fits else f"{found.missing:,} bytes too much"
    return _entry(variation, found.fits, found.bytes_per_chip["total"], found, reason)


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


def _read(folder: Path | None, topology: Topology) -> dict[str, dict[str, Any]]:
    path = None if folder is None else folder / FILE
    if path is None or not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text())
        if kept["topology"] != topology.title:
            raise PreflightError(f"{path} holds a search for {kept['topology']}, not {topology.title}; choose another --output")
        return {one["what"]: one for one in kept["candidates"]}
    except (ValueError, KeyError, TypeError) as error:
        raise PreflightError(f"{path} is no search of preflight ({error}); delete it, or choose another --output") from error


def _write(folder: Path | None, topology: Topology, kept: dict[str, dict[str, Any]]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}"
    temporary.write_text(json.dumps({"topology": topology.title, "candidates": list(kept.values())}, indent=1) + "\n")
    temporary.replace(folder / FILE)
