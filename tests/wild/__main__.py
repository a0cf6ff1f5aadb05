"""Programs of libraries from the package registry, under stock Lightning and here: ``python -m tests.wild [NAME …]``.

Each program of ``programs/`` is run twice by this Python: as it is, and by ``python -m torch_compat``. Losses, metrics and
weights are compared, and the table of ``docs/wild.md`` is written. Needs ``requirements.txt`` (``make test-wild`` makes an
environment of its own). Ends with status 1 where a program crashes here that does not under stock, or gives other numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "wild.md"
TIMEOUT_S = 900
TOLERANCE = 2e-3
"""Greatest relative difference of a loss, a metric or a weight's mean size that still counts as the same numbers."""


@dataclass
class Run:
    """A program's run.

    Attributes:
        status: of the process; None where it ran past its time.
        seconds: the wall time of the process.
        record: losses, metrics and weights, see ``programs/recorder.py``.
        report: the runs of the run report; empty under stock.
        last_line: the last line of its error output.
    """

    status: int | None
    seconds: float
    record: Mapping[str, Any] = field(default_factory=dict)
    report: Sequence[Mapping[str, Any]] = ()
    last_line: str = ""


def run(program: Path, *, ours: bool) -> Run:
    """Run a program in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        record, report = Path(folder) / "record.json", Path(folder) / "report.json"
        environment = {**os.environ, "WILD_RECORD": str(record), "PYTHONPATH": f"{ROOT}:{PROGRAMS}"}
        if ours:
            environment["XLATRAIN_REPORT"] = str(report)
        command = [sys.executable, "-W", "ignore", *(["-m", "torch_compat"] if ours else []), str(program)]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Run(None, TIMEOUT_S)
        lines = done.stderr.strip().splitlines()
        return Run(
            done.returncode,
            time.monotonic() - began,
            json.loads(record.read_text()) if record.exists() else {},
            json.loads(report.read_text())["runs"] if report.exists() else (),
            lines[-1][:200] if lines else "",
        )


def difference(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> float:
    """The greatest relative difference of two records; infinite where they hold other entries."""
    pairs: list[tuple[Any, Any]] = []
    for part in ("metrics", "weights"):
        if stock.get(part, {}).keys() != ours.get(part, {}).keys():
            return math.inf
        pairs += [(value, ours[part][name]) for name, value in stock.get(part, {}).items()]
    if len(stock.get("losses", ())) != len(ours.get("losses", ())):
        return math.inf
    pairs += zip(stock.get("losses", ()), ours.get("losses", ()), strict=True)
    return max((_relative(a, b) for a, b in pairs), default=math.inf)


def _relative(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-3)


def ran(ours: Run) -> str:
    """How the program's fits ran here: compiled, eager, some of each, or not to the end."""
    kinds = [one["executor"] for one in ours.report if one.get("stage") == "fit"]
    if ours.status != 0:
        return "crashed" if ours.status is not None else "ran past its time"
    if len(set(kinds)) > 1:
        return f"{kinds.count('compiled')} of {len(kinds)} compiled"
    return kinds[0] if kinds else "no report"


def reason(ours: Run) -> str:
    """Why it did not compile, or crashed: in a line."""
    if ours.status != 0:
        return ours.last_line
    found = [one["fallback"] for one in ours.report if one.get("fallback")]
    return re.sub(r"\s+", " ", str(found[0])).replace("|", "/")[:200] if found else ""


@dataclass
class Row:
    """A line of the table."""

    name: str
    stock: Run
    ours: Run

    @property
    def difference(self) -> float:
        return difference(self.stock.record, self.ours.record) if self.stock.status == self.ours.status == 0 else math.inf

    @property
    def fails(self) -> bool:
        """Whether it crashes here alone, or its numbers are others."""
        return self.stock.status == 0 and (self.ours.status != 0 or self.difference > TOLERANCE)

    def cells(self) -> list[str]:
        same = "–" if math.isinf(self.difference) else f"{self.difference:.0e}"
        stock = "ran" if self.stock.status == 0 else "crashed"
        times = f"{self.stock.seconds:.0f} / {self.ours.seconds:.0f}"
        return [self.name, stock, ran(self.ours), same, times, reason(self.ours)]


def page(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    libraries = [
        line.split("==")[0].split("[")[0] for line in (Path(__file__).parent / "requirements.txt").read_text().splitlines()
    ]
    head = ["program", "stock", "here", "greatest relative difference", "s, stock / here", "why not compiled"]
    lines = [
        "# Programs of other people",
        "",
        "Models of libraries from the package registry, the same script under stock Lightning and under",
        "`python -m torch_compat`, on one CPU device. Written by `make test-wild` with "
        + ", ".join(filter(None, map(_versioned, libraries)))
        + ".",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row.cells())} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _versioned(library: str) -> str:
    try:
        return f"{library} {version(library)}" if library and not library.startswith("#") else ""
    except PackageNotFoundError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wild", description=__doc__)
    parser.add_argument("names", nargs="*", help="programs; default: all, and docs/wild.md is written")
    names = parser.parse_args().names
    rows = []
    for program in sorted(PROGRAMS.glob("*.py")):
        if program.stem == "recorder" or (names and program.stem not in names):
            continue
        row = Row(program.stem, run(program, ours=False), run(program, ours=True))
        print(" | ".join(row.cells()), flush=True)
        rows.append(row)
    if not names:
        PAGE.write_text(page(rows))
    return int(any(row.fails for row in rows))


if __name__ == "__main__":
    sys.exit(main())
