"""Source files that are edited after they were imported: their functions keep the code that was imported."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest

from torch_compat.step.guards.instrumented import _codes, noted_code
from xlatrain.xla import kept_files

SOURCE = "def scaled(x):\n    return [x * 0.5 for _ in (1, 2)]\n"


def imported(path: Path) -> Any:
    path.write_text(SOURCE)
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, str(path), "exec"), namespace)
    return namespace["scaled"]


def test_a_function_whose_file_is_as_it_was_has_notes(tmp_path: Path) -> None:
    assert noted_code(imported(tmp_path / "as_it_was.py").__code__) is not None


@pytest.mark.parametrize(("before", "after"), [("0.5", "0.1"), ("(1, 2)", "(1, 3)"), ("0.5", "5.0"), ("x * ", "x + ")])
def test_a_function_whose_file_was_edited_has_none(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    function = imported(path)
    path.write_text(SOURCE.replace(before, after))
    linecache.checkcache(str(path))
    assert noted_code(function.__code__) is None


def test_notes_are_kept_for_the_next_process_by_the_text_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "kept.py", tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(kept_files, "_folder", folder)
    path.write_text(SOURCE)
    made = _codes(str(path), SOURCE)
    with monkeypatch.context() as without:
        without.setattr("torch_compat.step.guards.instrumented.Rewriter", None)  # nothing is rewritten
        assert _codes(str(path), SOURCE) == made
    assert _codes(str(path), SOURCE.replace("0.5", "0.1")) != made
    assert len(list(folder.iterdir())) == 2


def test_a_function_with_patterns_has_notes(tmp_path: Path) -> None:
    """The classes, values and keys of patterns may have dots, and nothing else."""
    patterns = (
        "kinds.Tensor()",
        "kinds.Point(x=kinds.ONE, y=[kinds.Tensor(), *_])",
        "{kinds.KEY: kinds.Tensor()}",
        "kinds.ONE | None",
    )
    source = "def matched(x, kinds):\n    match x:\n" + "".join(
        f"        case {one}:\n            return x.name\n" for one in patterns
    )
    path = tmp_path / "patterns.py"
    path.write_text(source)
    namespace: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), namespace)
    assert noted_code(namespace["matched"].__code__) is not None
