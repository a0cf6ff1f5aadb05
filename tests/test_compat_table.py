"""``docs/lightning_compat_table.md``: complete, explained and up to date."""

from __future__ import annotations

from typing import Any

import pytest

from tools import compat_table as table


@pytest.mark.slow
def test_the_committed_table_is_complete_and_up_to_date() -> None:
    """Every public name of the installed stock Lightning is the same here, or explained. Else: ``make compat-table``."""
    reasons = table.Reasons(table.REASONS.read_text())
    stock, ours, stock_globals, cannot_be_imported = table.take_inventories()
    assert cannot_be_imported == []  # of all modules, what they only import too; what is refused raises where it is used
    assert table.GLOBALS.read_text() == stock_globals, "run `make compat-table`"
    rows = list(table.rows(stock, ours, reasons))
    assert len(rows) > 600
    assert table.problems(rows, reasons, table.render(rows, "2.6.6")) == []


A = ["a", "POSITIONAL_OR_KEYWORD", None]
B = ["b", "POSITIONAL_OR_KEYWORD", "1"]
KWARGS = ["kwargs", "VAR_KEYWORD", None]


@pytest.mark.parametrize(
    ("stock", "ours", "difference"),
    [
        ([A, B], [A, B], None),
        ([A, B], [A, B, ["c", "KEYWORD_ONLY", "2"]], None),
        ([A], [A, KWARGS], None),
        (None, [A], None),
        ([A, B], [A], "no argument `b`"),
        ([A, B], [A, ["b", "POSITIONAL_OR_KEYWORD", "2"]], "`b=2`, stock `1`"),
        ([A, B], [A, ["b", "KEYWORD_ONLY", "1"]], "`b` by name only"),
        ([A, B], [B, A], "`a` at another position"),
        ([A], [A, ["c", "KEYWORD_ONLY", None]], "needs `c`"),
        ([A, KWARGS], [A], "takes no **kwargs"),
    ],
)
def test_signatures(stock: Any, ours: Any, difference: str | None) -> None:
    assert table.signature_difference(stock, ours) == difference


def entry(**members: Any) -> dict[str, Any]:
    return {"kind": "class", "signature": [A], "members": members}


def test_what_is_missing_or_different_must_be_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    method, other = {"kind": "method", "signature": [A]}, {"kind": "method", "signature": [A, ["z", "KEYWORD_ONLY", None]]}
    stock = {"m": {"C": entry(f=method, g=method, h=method), "D": entry(), "E": entry(), "F": entry()}}
    ours = {
        "m": {
            "C": entry(f=method, g=other, h=None),
            "D": {"missing": "D is not offered: use C"},
            "E": {"missing": ""},
            "F": entry(),
        }
    }
    reasons = table.Reasons("[refused]\n'm.C.*' = 'no'\n'm.F' = 'is there'\n'm.G' = 'nothing'\n")
    rows = list(table.rows(stock, ours, reasons))
    assert [(row.path, row.state, row.why) for row in rows] == [
        ("m.C", "same", ""),
        ("m.C.f", "same", ""),
        ("m.C.g", "refused", "no"),
        ("m.C.h", "refused", "no"),
        ("m.D", "refused", "D is not offered: use C"),
        ("m.E", "unexplained", "missing"),
        ("m.F", "refused", "is there"),
    ]
    page = table.render(rows, "0")
    monkeypatch.setattr(table, "TABLE", table.TABLE.with_name("no such page.md"))
    assert table.problems(rows, reasons, page) == [
        "m.E: not explained in compat_reasons.toml: missing",
        "m.F: compat_reasons.toml says refused, but it is there, with stock's signature",
        "compat_reasons.toml: nothing matches 'm.G' any more: remove it",
        "no such page.md is stale: run `make compat-table`",
    ]
    assert "| `g` | refused | no |" in page
    assert "same (1): `f`" in page
