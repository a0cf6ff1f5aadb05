"""The page ``docs/wild.md``, which is also the record of what was measured: a row stays until its program is run again."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

Cells = list[str]
HEAD = ("program", "row of", "stock", "here", "difference", "on 8 devices", "s, stock / here", "why not compiled")
OTHER_NUMBERS = "other numbers"
"""In the cell of a run that ended with other numbers than stock's."""
_SUMMARY = re.compile(r"^Of \d+ programs .*$", re.MULTILINE)


def rows_of(page: str) -> dict[str, Cells]:
    """The rows of a page's table by program."""
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in found}


def with_rows(page: str, rows: Mapping[str, Cells], programs: Collection[str]) -> str:
    """The page with a table of these rows, and a summary of them; all other text stays.

    Args:
        page: the page as it is.
        rows: the cells of :data:`HEAD` by program.
        programs: the names of all programs, measured or not.
    """
    kept = [rows[name] for name in sorted(rows) if name in programs]
    went = [row for row in kept if row[2] == "ran"]
    bad = sum(any(word in f"{row[3]} {row[5]}" for word in ("crashed", "ran past", OTHER_NUMBERS)) for row in went)
    missing = sorted(set(programs) - rows.keys())
    compiled = sum(row[3] == "compiled" for row in went)
    summary = f"Of {len(went)} programs that run under stock {compiled} compile, and {bad} crash or give other numbers."
    summary += f" Not measured here: {', '.join(missing)}." if missing else ""
    text = _SUMMARY.sub(lambda _: summary, page[: page.index("\n| ") + 1], count=1)
    head, *lines = (f"| {' | '.join(row)} |\n" for row in (HEAD, *kept))
    return text + head + f"|{'---|' * len(HEAD)}\n" + "".join(lines)
