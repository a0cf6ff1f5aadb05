"""A result file: what was measured on which machine, written after every row, so that a cut loses one row at most."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from benchmarks.measurements import Row

FAILED = "failed"
"""The value of a row of something that could not be measured."""
TOLERANCE = 1.10


class Result:
    """The rows of a result file.

    Args:
        path: of the file.
        machine: hardware and versions, see :func:`benchmarks.hardware.describe`.
        rows: that are there.
        date: of the first row.
    """

    def __init__(self, path: Path, machine: dict[str, str], rows: list[Row], date: str) -> None:
        self.path = path
        self.machine = machine
        self.rows = rows
        self._date = date

    @classmethod
    def new(cls, folder: Path, machine: dict[str, str]) -> Result:
        """A result of today, which has no file before its first row."""
        today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H%M")
        return cls(folder / f"{today}.json", machine, [], today)

    @classmethod
    def of_file(cls, path: Path, machine: dict[str, str]) -> Result:
        """The result in a file, to go on with; what failed is measured again.

        Raises:
            RuntimeError: it was measured on another machine, or with other versions.
        """
        found = json.loads(path.read_text())
        others = [name for name, value in machine.items() if name != "load_before" and found["machine"].get(name) != value]
        if others:
            told = ", ".join(f"{name} {found['machine'].get(name)}, not {machine[name]}" for name in others)
            raise RuntimeError(f"{path} was measured with {told}: rows of one file are of one machine. Begin a new file")
        rows = [Row(**row) for row in found["rows"] if row["value"] != FAILED]
        return cls(path, found["machine"], rows, found["date"])

    def without(self, names: Collection[str]) -> list[str]:
        """Those of ``names`` that no row begins with."""
        there = {row.what.partition(" ")[0] for row in self.rows}
        return [name for name in names if name not in there]

    def add(self, row: Row) -> None:
        """Add a row to the file."""
        self.rows.append(row)
        self.path.parent.mkdir(exist_ok=True)
        found = {"date": self._date, "machine": self.machine, "rows": [row.as_json() for row in self.rows]}
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(found, indent=2) + "\n")
        os.replace(aside, self.path)


def worsened(before: Iterable[Row], now: Iterable[Row]) -> list[str]:
    """A line for each ratio that is worse than it was by more than :data:`TOLERANCE`, or gone, of what was measured now."""
    found = {row.what: row for row in now}
    measured = {what.partition(" ")[0] for what in found}
    lines = []
    for old in before:
        new = found.get(old.what)
        if not old.is_ratio or old.what.partition(" ")[0] not in measured:
            continue
        if new is None or not new.is_ratio:
            lines.append(f"{old.what}: {old.value}, now not measured")
        elif _growth(old, new) > TOLERANCE:
            lines.append(f"{old.what}: {old.value}, now {new.value}")
    return lines


def _growth(old: Row, new: Row) -> float:
    return old.ratio / new.ratio if new.target.startswith(">=") else new.ratio / old.ratio
