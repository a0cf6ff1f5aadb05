"""What stock came to is kept for as long as nothing has changed that decides about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import stock_runs


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(stock_runs, "STORE", tmp_path / "store")
    (tmp_path / "script.py").write_text("import lightning\nfrom part import x\n")
    (tmp_path / "part.py").write_text("def f():\n    import torch_compat\nx = 1\n")
    return []


def result(folder: Path, runs: list[int], *arguments: str, is_kept: bool = True) -> int:
    def run() -> int:
        runs.append(len(runs))
        return len(runs)

    return stock_runs.kept_result(folder / "script.py", arguments, run, is_kept=lambda _: is_kept)


def test_once_for_equal_scripts_and_arguments(tmp_path: Path, runs: list[int]) -> None:
    assert [result(tmp_path, runs), result(tmp_path, runs), result(tmp_path, runs, "--other"), result(tmp_path, runs)] == [
        1,
        1,
        2,
        1,
    ]


@pytest.mark.parametrize("name", ["script", "part"])
def test_again_when_a_source_changes(name: str, tmp_path: Path, runs: list[int]) -> None:
    before = result(tmp_path, runs)
    path = tmp_path / f"{name}.py"
    path.write_text(path.read_text() + "y = 2\n")
    assert (before, result(tmp_path, runs)) == (1, 2)


def test_again_in_another_release_of_a_package(tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = result(tmp_path, runs)
    monkeypatch.setattr(stock_runs, "_surroundings", lambda: ("lightning 9",))
    assert (before, result(tmp_path, runs)) == (1, 2)


def test_not_what_is_ours_and_not_what_was_cut_off(tmp_path: Path, runs: list[int]) -> None:
    assert [result(tmp_path, runs, is_kept=False), result(tmp_path, runs)] == [1, 2]
    (tmp_path / "part.py").write_text("import torch_compat\n")
    assert [result(tmp_path, runs), result(tmp_path, runs)] == [3, 4]
