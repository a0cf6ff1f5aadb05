"""The findings of preflight, as data. ``docs/preflight.md`` has the schema of its JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xlatrain.preflight.estimate import Estimate
from xlatrain.preflight.stored import StoredProgram

SCHEMA = 1
"""Of ``preflight.json``; a new number when a field changes its meaning."""
FILE = "preflight.json"
PAGE = "preflight.html"


@dataclass(frozen=True)
class ArrayBytes:
    """An array of the training state.

    Attributes:
        path: of the parameter, e.g. ``"model.lm_head.weight"``, or of optimizer state ``"optimizer: …"``.
        shape, dtype: of the whole array.
        spec: which mesh axes split which dims, in JAX's words.
        replicas: copies of each of its parts over the mesh.
        bytes_per_chip: on one chip.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    replicas: int
    bytes_per_chip: int


@dataclass(frozen=True)
class StepReport:
    """A program.

    Attributes:
        name: ``"train"``, ``"accumulate"``, ``"update"``, ``"validation"``.
        runs: how often it runs in one optimizer step (0: validation).
        bytes_per_chip: ``parameters``, ``gradients``, ``optimizer``, ``batch``, ``temporaries``, ``total``, ``hbm``;
            ``host``: of the memory of its host (what is offloaded), where the program fits.
        refused: the compiler's words where it does not fit.
        collectives: mesh axis → kind → ``{"count", "bytes", "synchronous_bytes"}`` of one run of the program, on one device.
        flops: on all devices.
        cycles: the compiler's own estimate. Only good for comparing programs of one chip with each other.
        seconds: of ``trace``, ``lower``, ``compile``.
        stablehlo: where its StableHLO was kept, if that was asked for.
    """

    name: str
    runs: int
    bytes_per_chip: dict[str, int]
    refused: str | None
    collectives: dict[str, dict[str, dict[str, int]]]
    flops: int
    cycles: int
    seconds: dict[str, float]
    stablehlo: StoredProgram | None = None


@dataclass(frozen=True)
class Change:
    """A change that was tried because the run does not fit.

    Attributes:
        what: in the user's words.
        fits: whether it does then; None where it was not compiled, and why is in ``reason``.
        total: bytes per chip that the compiler asks for then.
    """

    what: str
    fits: bool | None
    total: int
    reason: str = ""


@dataclass
class Report:
    """The whole finding.

    Attributes:
        fits: every program fits.
        topology: name of a slice.
        num_slices: of them.
        chips: of all slices.
        mesh: axis → size.
        parameters: number of elements.
        bytes_per_chip: of the program that needs most.
        collectives: of one optimizer step: mesh axis → kind → ``{"count", "bytes", "synchronous_bytes"}`` on one device.
        flops_per_step: of one optimizer step, on all devices.
        estimate: the roofline; None where it does not fit, or for CPUs.
        seconds: of each stage of preflight, and ``total``.
        missing: bytes per chip that are too many; 0 where it fits.
        contributors: what takes most, where it does not fit.
        changes: what was tried then.
        largest: the largest arrays of the state.
        replicated_bytes: per chip, of parameters and optimizer state that every device of the batch axes has a copy of.
        steps: each program.
        loops: repeated layers, rolled or not and why.
        attention: of each kind of attention op how many there are, which kernel computes it, and why.
        notes: assumptions about batch and run.
        settings: what decides about the programs: strategy, precision, rules, batch.
        peak_memory: bytes of host memory that preflight took at its peak.
        versions: of what compiled.
        schema: see :data:`SCHEMA`.
        search: what a search has tried, the best first.
    """

    fits: bool
    topology: str
    num_slices: int
    chips: int
    mesh: dict[str, int]
    parameters: int
    bytes_per_chip: dict[str, int]
    collectives: dict[str, dict[str, dict[str, int]]]
    flops_per_step: int
    estimate: Estimate | None
    seconds: dict[str, float]
    missing: int
    contributors: list[dict[str, Any]]
    changes: list[Change]
    largest: list[ArrayBytes]
    replicated_bytes: int
    steps: list[StepReport]
    loops: list[str]
    notes: list[str]
    settings: dict[str, Any]
    peak_memory: int
    versions: dict[str, str]
    schema: int = SCHEMA
    search: list[dict[str, Any]] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as ``preflight.json`` has it."""
        return dataclasses.asdict(self)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``preflight.json`` and ``preflight.html`` into a folder; returns the path of the first."""
        from xlatrain.preflight.page import page

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, text in ((PAGE, page(self)), (FILE, json.dumps(self.to_dict(), indent=1) + "\n")):
            temporary = target / f".{name}.{os.getpid()}"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target / name)
        return target / FILE

    def __str__(self) -> str:
        from xlatrain.preflight.text import lines

        return "\n".join(lines(self))
