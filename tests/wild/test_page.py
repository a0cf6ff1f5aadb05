"""The page of programs of other people keeps what was not measured again."""

from __future__ import annotations

from pathlib import Path

from tests.wild.page import HEAD, OTHER_NUMBERS, rows_of, with_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "wild.md").read_text()
PROGRAMS = {one.stem for one in (ROOT / "tests" / "wild" / "programs").glob("*.py")} - {"recorder"}


def test_the_page_is_what_its_own_rows_make() -> None:
    assert with_rows(PAGE, rows_of(PAGE), PROGRAMS) == PAGE


def test_a_new_row_is_counted_and_no_other_changes() -> None:
    rows = rows_of(PAGE)
    name = min(PROGRAMS - rows.keys(), default=min(rows))
    rows[name] = [name, "2026-11-29", "ran", "compiled, other numbers", "1e-01", "", "1 / 2", ""]
    page = with_rows(PAGE, rows, PROGRAMS)
    bad = sum(OTHER_NUMBERS in f"{row[3]} {row[5]}" for row in rows.values())
    assert f"and {bad} crash or give other numbers" in page
    assert set(page.splitlines()) >= {line for line in PAGE.splitlines() if line.startswith("| ") and f"| {name} |" not in line}
    assert all(len(row) == len(HEAD) for row in rows_of(page).values())
