"""Makes ``docs/lightning_compat_table.md``: every public name of the installed stock Lightning, and what is here; and
``torch_compat/stock_names/stock.json``: all globals of its modules, from which names that only they have are made here.

``python -m tools.compat_table`` writes the table; with ``--check`` it only says what is stale or not explained. Why a name is
better, different or refused is written by hand in ``docs/compat_reasons.toml``.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.stock_globals import render as render_globals

ROOT = Path(__file__).resolve().parents[1]
INVENTORY = Path(__file__).with_name("compat_inventory.py")
REASONS = ROOT / "docs/compat_reasons.toml"
TABLE = ROOT / "docs/lightning_compat_table.md"
GLOBALS = ROOT / "torch_compat/stock_names/stock.json"
STATES = ("same", "better", "differs", "refused")
_PROCESS_LIMIT_S = 300

_NOT_OFFERED = re.compile(r"^`?lightning[\w.]*`? is not offered[^:]*: ")  # what our refusals begin with

Inventory = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A public name: where it is, its state, and why; ``agrees``: whether it is there with stock's signature."""

    module: str
    owner: str
    name: str
    state: str
    why: str
    agrees: bool

    @property
    def path(self) -> str:
        """The path that reasons are looked up by: ``lightning.pytorch.Trainer.fit``, ``lightning.pytorch.Trainer(profiler)``."""
        return f"{self.module}.{self.owner}{self.name}"


class Reasons:
    """Hand-written reasons: state → path or pattern → why.

    A path itself comes before patterns. A pattern under ``refused`` is about what is missing or different only.
    """

    def __init__(self, text: str) -> None:
        self._entries = [(pattern, state, why) for state, whys in tomllib.loads(text).items() for pattern, why in whys.items()]
        unknown = {state for _, state, _ in self._entries} - set(STATES)
        if unknown:
            raise ValueError(f"{REASONS.name}: unknown states {sorted(unknown)}; expected {', '.join(STATES)}")
        self._used: set[str] = set()

    def find(self, path: str, agrees: bool) -> tuple[str, str] | None:
        """State and reason of a path; ``agrees``: it is there, with stock's signature."""
        for pattern, state, why in sorted(self._entries, key=lambda entry: entry[0] != path):
            if pattern == path or (fnmatch.fnmatchcase(path, pattern) and not (agrees and state == "refused")):
                self._used.add(pattern)
                return state, why
        return None

    def unused(self) -> list[str]:
        """Patterns that no path matched."""
        return [pattern for pattern, _, _ in self._entries if pattern not in self._used]


def rows(stock: Inventory, ours: Inventory, reasons: Reasons) -> Iterator[Row]:
    """All rows, in the order of the inventory."""
    for module, names in stock.items():
        for name, entry in names.items():
            found = ours[module][name]
            yield from _name_rows(module, name, entry, found, reasons)


def _name_rows(module: str, name: str, entry: Any, found: Any, reasons: Reasons) -> Iterator[Row]:
    is_there = "missing" not in found
    if is_there and name == "Trainer" and entry["members"]:
        yield from _argument_rows(module, name, entry, found, reasons)
    row = _row(module, "", name, entry, found, reasons)
    yield row
    if is_there and row.state != "refused":
        for member, described in entry.get("members", {}).items():
            there = found["members"].get(member) or {"missing": ""}
            yield _row(module, f"{name}.", member, described, there, reasons)


def _argument_rows(module: str, name: str, entry: Any, found: Any, reasons: Reasons) -> Iterator[Row]:
    theirs = {parameter[0]: parameter[1:] for parameter in entry["signature"]}
    ours = {parameter[0]: parameter[1:] for parameter in found["signature"]}
    for argument, described in theirs.items():
        there = {"missing": ""} if argument not in ours else {"kind": "value", "signature": [["", *ours[argument]]]}
        expected = {"kind": "value", "signature": [["", *described]]}
        yield _row(module, f"{name}(", f"{argument})", expected, there, reasons)


def _row(module: str, owner: str, name: str, entry: Any, found: Any, reasons: Reasons) -> Row:
    missing = found.get("missing")
    problem = missing if missing is not None else difference(entry, found)
    agrees = problem is None
    by_hand = reasons.find(f"{module}.{owner}{name}", agrees)
    if by_hand is not None:
        return Row(module, owner, name, *by_hand, agrees)
    if missing:
        return Row(module, owner, name, "refused", _NOT_OFFERED.sub("", missing), agrees)
    return Row(module, owner, name, "same" if agrees else "unexplained", problem or ("" if agrees else "missing"), agrees)


def difference(stock: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Why what stock has cannot be used here in the same way; None if it can."""
    if stock["kind"] != ours["kind"]:
        return f"a {stock['kind']} in stock, a {ours['kind']} here"
    if above := [base for base in stock.get("bases", ()) if base not in ours.get("bases", ())]:
        return f"no subclass of {', '.join(above)}"
    if stock.get("values") != ours.get("values"):
        return f"stock has the values {stock.get('values')}"
    return signature_difference(stock.get("signature"), ours.get("signature"))


def signature_difference(stock: Any, ours: Any) -> str | None:
    """Why a call that stock accepts may not be accepted here; None if all are. More optional parameters are no difference."""
    if stock is None or ours is None:
        return None
    by_name = {name: (position, kind, default) for position, (name, kind, default) in enumerate(ours)}
    has_var = {kind for _, kind, _ in ours}
    for position, (name, kind, default) in enumerate(stock):
        if kind in ("VAR_POSITIONAL", "VAR_KEYWORD"):
            if kind not in has_var:
                return f"takes no {'*args' if kind == 'VAR_POSITIONAL' else '**kwargs'}"
            continue
        if name not in by_name:
            return f"no argument `{name}`"
        there, own_kind, own_default = by_name[name]
        if own_kind == "KEYWORD_ONLY" and kind != "KEYWORD_ONLY":
            return f"`{name}` by name only"
        if kind == "POSITIONAL_OR_KEYWORD" and there != position:
            return f"`{name}` at another position"
        if default is not None and own_default != default:
            return f"`{name}={own_default}`, stock `{default}`"
    extra = [name for name, kind, default in ours if default is None and not kind.startswith("VAR_")]
    needed = [name for name in extra if name not in {parameter[0] for parameter in stock}]
    return f"needs `{needed[0]}`" if needed else None


def take_inventories() -> tuple[Inventory, Inventory, str, list[str]]:
    """The inventories of stock Lightning and of this package, each from a process of its own; the text of ``stock.json``; and
    names of stock's modules whose import fails here.

    Raises:
        RuntimeError: one of them failed, e.g. because stock Lightning is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        stock, ours = Path(folder) / "stock.json", Path(folder) / "ours.json"
        _run(str(INVENTORY), str(stock))
        _run("-m", "torch_compat", str(INVENTORY), str(ours), str(stock))
        theirs, found = json.loads(stock.read_text()), json.loads(ours.read_text())
        return theirs["api"], found["api"], render_globals(theirs["globals"]), found["missing"]


def _run(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=_PROCESS_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")


_HEADER = """# Every public name of Lightning 2.6

Made by `make compat-table` from the installed stock Lightning {version} and what `torch_compat` really has; do not edit. Names
and signatures are compared here, behaviour in `tests/parity/`. Reasons: `docs/compat_reasons.toml`.

- **same**: there, and every call that stock accepts is accepted;
- **better**: the same, and more: why;
- **differs**: there, with another signature or meaning: why;
- **refused**: absent, or raises with what to use instead.

"""


def render(all_rows: list[Row], version: str) -> str:
    """The page."""
    parts = [_HEADER.format(version=version), _summary(all_rows)]
    for module in dict.fromkeys(row.module for row in all_rows):
        parts.append(f"\n## {module}\n")
        mine = [row for row in all_rows if row.module == module]
        for owner in dict.fromkeys(row.owner for row in mine):
            parts.append(_section(owner, [row for row in mine if row.owner == owner]))
    return "".join(parts)


def _summary(all_rows: list[Row]) -> str:
    lines = [f"| | {' | '.join(STATES)} |\n|---|{'---|' * len(STATES)}\n"]
    for module in [*dict.fromkeys(row.module for row in all_rows), "all"]:
        counts = [sum(row.state == state and module in (row.module, "all") for row in all_rows) for state in STATES]
        lines.append(f"| {module} | {' | '.join(map(str, counts))} |\n")
    return "".join(lines)


def _section(owner: str, mine: list[Row]) -> str:
    title = "" if not owner else f"\n### `{owner[:-1]}`: {'arguments' if owner.endswith('(') else 'members'}\n"
    same = [f"`{row.name.rstrip(')')}`" for row in mine if row.state == "same"]
    text = title + (f"\nsame ({len(same)}): {', '.join(same)}\n" if same else "")
    others = [row for row in mine if row.state != "same"]
    if others:
        text += "\n| name | | why |\n|---|---|---|\n"
        text += "".join(f"| `{row.name.rstrip(')')}` | {row.state} | {row.why.replace('|', '/')} |\n" for row in others)
    return text


def problems(all_rows: list[Row], reasons: Reasons, page: str) -> list[str]:
    """The faults of the committed table."""
    found = [f"{row.path}: not explained in {REASONS.name}: {row.why}" for row in all_rows if row.state == "unexplained"]
    wrong = [row for row in all_rows if (row.state == "refused" and row.agrees) or (row.state == "better" and not row.agrees)]
    found += [f"{row.path}: {REASONS.name} says {row.state}, but it {_is(row)}" for row in wrong]
    found += [f"{REASONS.name}: nothing matches {pattern!r} any more: remove it" for pattern in reasons.unused()]
    if not TABLE.exists() or TABLE.read_text() != page:
        found.append(f"{TABLE.name} is stale: run `make compat-table`")
    return found


def _is(row: Row) -> str:
    return "is there, with stock's signature" if row.agrees else "is not there with stock's signature"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if something is wrong")
    args = parser.parse_args()
    reasons = Reasons(REASONS.read_text())
    stock, ours, stock_globals, missing = take_inventories()
    all_rows = list(rows(stock, ours, reasons))
    page = render(all_rows, version("lightning"))
    if not args.check:
        TABLE.write_text(page)
        GLOBALS.write_text(stock_globals)
    found = [*problems(all_rows, reasons, page), *(f"{name}: cannot be imported" for name in missing)]
    print("\n".join(found) or f"{len(all_rows)} names, nothing to explain")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
