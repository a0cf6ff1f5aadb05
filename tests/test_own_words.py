"""Texts of the packages are in our words; an error or a warning that stock has too begins with the clause that it is told by."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 17
"""Words in a row that a text may share with one of stock's: the clause that an error or a warning begins with, which filters,
tests (``match=``) and scripts tell it by. How it goes on is ours."""
KEPT = (
    "did not improve in the last",  # EarlyStopping's ``stopping_reason_message``, a value that checkpoints hold: 19
    "Consider increasing the value of the `num_workers` argument",  # by which scripts everywhere filter this warning: 22
)


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """(``file:line``, text) of every string in the Python files; what an f-string fills in is a null character."""
    for path in sorted(folder.rglob("*.py")):
        inside: set[int] = set()
        for node in ast.walk(ast.parse(path.read_text())):  # an f-string comes before its parts
            if isinstance(node, ast.JoinedStr):
                inside |= {id(part) for part in ast.walk(node)}
                parts = [str(part.value) if isinstance(part, ast.Constant) else " \0 " for part in node.values]
                yield f"{path.relative_to(folder.parent)}:{node.lineno}", "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                yield f"{path.relative_to(folder.parent)}:{node.lineno}", node.value


def runs_of_words(text: str, length: int) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"[\w.']+|\0", text.lower())
    yield from (tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def shared(ours: str, theirs: str, length: int) -> bool:
    return not set(runs_of_words(ours, length)).isdisjoint(runs_of_words(theirs, length))


def test_shared_words_are_found() -> None:
    assert shared("He said: one, two three", "one two THREE four", 3)
    assert not shared("one two three", "one two four", 3)


def test_no_text_is_stocks() -> None:
    spec = importlib.util.find_spec("lightning")
    assert spec is not None and spec.submodule_search_locations
    known = {run for _, text in texts(Path(spec.submodule_search_locations[0])) for run in runs_of_words(text, MOST + 1)}
    assert len(known) > 10_000
    packages = [ROOT / "xlatrain", ROOT / "torch_compat"]
    found = [
        (where, " ".join(run))
        for package in packages
        for where, text in texts(package)
        if not any(clause in text for clause in KEPT)
        for run in runs_of_words(text, MOST + 1)
        if run in known
    ]
    assert found == []
