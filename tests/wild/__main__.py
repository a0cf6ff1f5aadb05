"""Programs of libraries from the package registry, under stock Lightning and here: ``python tests/wild [NAME …]``.

Each program of ``programs/`` is run by this Python: as it is, by ``python -m torch_compat``, and if its batches can be split
(``recorder.fit``) by that on eight devices, too. Losses, metrics and weights are compared, and the program's row of
``docs/wild.md`` is written as soon as it is known; the rows of other programs stay. Needs ``requirements.txt``
(``make test-wild`` makes an environment of its own). Ends with status 1 where a program crashes here that does not under stock,
or gives other numbers.
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
from datetime import date
from pathlib import Path
from typing import Any

from page import OTHER_NUMBERS, rows_of, with_rows
from torchvision_stubs import write_stubs

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
PAGE = ROOT / "docs" / "wild.md"
TIMEOUT_S = 900
_FOLDERS = re.compile(r"/[^\s()]*/(site-packages|tests/wild/programs)/")
TOLERANCE = 2e-3
"""Greatest relative difference of a loss, a metric or a weight's mean size that still counts as the same numbers."""
TOLERANCE_IN_DOUBLE = 1e-6
"""The same of both runs in double precision: these decide on weights that rounding alone moves."""


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


def run(program: Path, *, ours: bool, devices: int = 1, precision: str = "32-true") -> Run:
    """Run a program in a process and a folder of its own; ``precision`` is ``recorder.PRECISION``."""
    with tempfile.TemporaryDirectory() as folder:
        record, report = Path(folder) / "record.json", Path(folder) / "report.json"
        environment = {**os.environ, "WILD_RECORD": str(record), "PYTHONPATH": f"{ROOT}:{PROGRAMS}", "WILD_DEVICES": str(devices)}
        environment["WILD_PRECISION"] = precision
        stubs = Path(folder) / "stubs"
        stubs.mkdir()
        if write_stubs(stubs):
            environment["LD_LIBRARY_PATH"] = f"{stubs}:{os.environ.get('LD_LIBRARY_PATH', '')}"
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


def difference(stock: Mapping[str, Any], ours: Mapping[str, Any], parts: Sequence[str] = ("metrics", "weights")) -> float:
    """The greatest relative difference of losses and ``parts`` of two records; infinite where they hold other entries."""
    pairs: list[tuple[Any, Any]] = []
    for part in parts:
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
    if not found:
        return ""
    return _FOLDERS.sub("", re.sub(r"\s+", " ", str(found[0]))).replace("|", "/")[:200]


@dataclass
class Row:
    """A line of the table.

    Attributes:
        eight: the run on eight devices; None where batches cannot be split.
        in_double: stock's run, ours and that on eight devices again in double precision; empty where it was not needed.
    """

    name: str
    stock: Run
    ours: Run
    eight: Run | None = None
    in_double: Sequence[Run | None] = ()

    def against_stock(self, other: Run | None) -> float:
        """The greatest relative difference from stock's run; infinite where either did not end."""
        return _between(self.stock, other)

    def doubles(self) -> list[float]:
        """The same of ours and of that on eight devices in double precision; infinite where they were not run."""
        if not self.in_double:
            return [math.inf, math.inf]
        stock, *mine = self.in_double
        return [math.inf if stock is None else _between(stock, one) for one in mine]

    def same(self, other: Run | None, in_double: float) -> bool:
        """Whether the numbers are stock's.

        A weight whose exact gradient is zero, as a bias before a batch norm, gets a gradient of rounding alone, which Adam makes
        whole steps of. In double precision nothing of that is seen. Losses and metrics have to agree as they are.
        """
        if self.against_stock(other) <= TOLERANCE:
            return True
        ended = other is not None and self.stock.status == 0 == other.status
        return ended and _between(self.stock, other, ("metrics",)) <= TOLERANCE and in_double <= TOLERANCE_IN_DOUBLE

    @property
    def fails(self) -> bool:
        """Whether it crashes here alone, or its numbers are others."""
        runs = zip((self.ours, self.eight), self.doubles(), strict=True)
        return self.stock.status == 0 and not all(one is None or self.same(one, double) for one, double in runs)

    def cells(self) -> list[str]:
        runs = list(zip((self.ours, self.eight), self.doubles(), strict=True))
        here, eight = ("" if one is None else self._went(one, double) for one, double in runs)
        shown = [_shown(self.against_stock(one), double) for one, double in runs]
        stock = "ran" if self.stock.status == 0 else "crashed"
        times = f"{self.stock.seconds:.0f} / {self.ours.seconds:.0f}"
        return [
            self.name, str(date.today()), stock, here, shown[0], eight and f"{eight}, {shown[1]}", times, reason(self.ours),
        ]  # fmt: skip

    def _went(self, one: Run, in_double: float) -> str:
        """How a run here went, and whether its numbers are others than stock's."""
        others = self.stock.status == 0 == one.status and not self.same(one, in_double)
        return ran(one) + (f", {OTHER_NUMBERS}" if others else "")


def _between(stock: Run, other: Run | None, parts: Sequence[str] = ("metrics", "weights")) -> float:
    ended = other is not None and stock.status == 0 == other.status
    return difference(stock.record, other.record, parts) if ended and other is not None else math.inf


def _shown(difference: float, in_double: float) -> str:
    if math.isinf(difference):
        return "–"
    return f"{difference:.0e}" if math.isinf(in_double) else f"{difference:.0e} ({in_double:.0e} in double)"


def row_of(program: Path, *, on_eight: bool) -> Row:
    """The line of a program."""
    row = Row(program.stem, run(program, ours=False), run(program, ours=True))
    if on_eight and "recorder.fit(" in program.read_text() and "data_parallel=False" not in program.read_text():
        row.eight = run(program, ours=True, devices=8)
    if row.fails and re.search(r"recorder\.(fit\(|trainer\(|PRECISION)", program.read_text()):
        eight = None if row.eight is None else run(program, ours=True, devices=8, precision="64-true")
        row.in_double = [*(run(program, ours=ours, precision="64-true") for ours in (False, True)), eight]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/wild", description=__doc__)
    parser.add_argument("names", nargs="*", help="programs; default: all")
    parser.add_argument("--missing", action="store_true", help="those alone that have no row yet: what a run that was cut left")
    parser.add_argument("--one-device", action="store_true", help="leave the runs on eight devices out")
    given = parser.parse_args()
    programs = {one.stem: one for one in sorted(PROGRAMS.glob("*.py")) if one.stem != "recorder"}
    if unknown := set(given.names) - programs.keys():
        parser.error(f"no program {', '.join(sorted(unknown))}; there are {', '.join(programs)}")
    there = rows_of(PAGE.read_text()) if given.missing else {}
    failed = False
    for name, program in programs.items():
        if (given.names and name not in given.names) or name in there:
            continue
        row = row_of(program, on_eight=not given.one_device)
        failed |= row.fails
        print(" | ".join(row.cells()), flush=True)
        page = PAGE.read_text()  # another call may have written rows
        PAGE.write_text(with_rows(page, {**rows_of(page), name: row.cells()}, programs.keys()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
