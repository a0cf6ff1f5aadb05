"""What stock came to is kept for as long as nothing has changed that decides about it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests import stock_runs


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    monkeypatch.setattr(stock_runs, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_text("lightning==2\nnumpy==2\n")
    stock_runs._surroundings.cache_clear()
    request.addfinalizer(stock_runs._surroundings.cache_clear)
    monkeypatch.setattr(stock_runs, "STORE", tmp_path / "store")
    monkeypatch.setattr(stock_runs, "OUTCOMES", tmp_path / "outcomes")
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


def test_not_again_where_a_package_brings_a_copy_of_another(
    tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """setuptools does, for whatever test imports it."""
    before = result(tmp_path, runs)
    copied = tmp_path / "vendored" / "numpy-1.0.dist-info"
    copied.mkdir(parents=True)
    (copied / "METADATA").write_text("Name: numpy\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(copied.parent)])
    stock_runs._surroundings.cache_clear()
    assert (before, result(tmp_path, runs)) == (1, 1)


def test_not_what_is_ours_and_not_what_was_cut_off(tmp_path: Path, runs: list[int]) -> None:
    assert [result(tmp_path, runs, is_kept=False), result(tmp_path, runs)] == [1, 2]
    (tmp_path / "part.py").write_text("import torch_compat\n")
    assert [result(tmp_path, runs), result(tmp_path, runs)] == [3, 4]


def test_what_is_shipped_is_there_for_a_clone_that_has_run_nothing(tmp_path: Path, runs: list[int]) -> None:
    before = result(tmp_path, runs), result(tmp_path, runs, "--other")
    stock_runs.ship()
    shutil.rmtree(tmp_path / "store")
    assert (result(tmp_path, runs), result(tmp_path, runs, "--other")) == before == (1, 2)
    assert len(list((tmp_path / "outcomes").iterdir())) == 2
    archives = {path: path.read_bytes() for path in (tmp_path / "outcomes").iterdir()}
    for path in archives:
        path.unlink()
    stock_runs.ship()
    assert archives == {path: path.read_bytes() for path in (tmp_path / "outcomes").iterdir()}


def test_what_no_script_is_any_more_is_not_shipped(tmp_path: Path, runs: list[int]) -> None:
    result(tmp_path, runs)
    stock_runs.ship()
    (tmp_path / "script.py").write_text("import lightning\n")
    stock_runs.ship()
    assert list((tmp_path / "outcomes").iterdir()) == []
    assert result(tmp_path, runs) == 2


def test_everything_runs_again_when_that_is_asked_for(tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    result(tmp_path, runs)
    stock_runs.ship()
    monkeypatch.setenv("STOCK_AGAIN", "1")
    assert result(tmp_path, runs) == 2
