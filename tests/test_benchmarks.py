"""The record of a benchmark: rows outlive a cut, one file is of one machine, and a worse figure is found."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import processes
from benchmarks.measurements import Row
from benchmarks.result import FAILED, Result, worsened


def row(what: str, value: str, target: str = "<= 1.05 x") -> Row:
    return Row(what, value, target, None, "")


def test_what_is_there_and_did_not_fail_is_not_measured_again(tmp_path: Path) -> None:
    first = Result.new(tmp_path, {"cpu": "a", "load_before": "0.1"})
    first.add(row("mlp train", "1.00 x"))
    first.add(row("gpt", FAILED))
    again = Result.of_file(first.path, {"cpu": "a", "load_before": "7.0"})
    assert again.without(["mlp", "gpt", "gnn"]) == ["gpt", "gnn"]
    again.add(row("gnn train", "0.50 x"))
    assert [one.what for one in Result.of_file(first.path, {"cpu": "a"}).rows] == ["mlp train", "gnn train"]


def test_rows_of_another_machine_do_not_go_into_the_file(tmp_path: Path) -> None:
    first = Result.new(tmp_path, {"cpu": "a"})
    first.add(row("mlp train", "1.00 x"))
    with pytest.raises(RuntimeError, match="measured with cpu a, not b"):
        Result.of_file(first.path, {"cpu": "b"})


@pytest.mark.parametrize(
    ("target", "now", "worse"),
    [
        ("<= 1.05 x", "1.12 x", True),
        ("<= 1.05 x", "1.08 x", False),
        (">= 1.00 x", "0.89 x", True),
        (">= 1.00 x", "1.12 x", False),
    ],
)
def test_a_ratio_is_worse_by_more_than_a_tenth(target: str, now: str, worse: bool) -> None:
    assert bool(worsened([row("mlp", "1.00 x", target)], [row("mlp", now, target)])) == worse


def test_a_ratio_that_is_gone_is_worse() -> None:
    before = [row("mlp train", "1.00 x"), row("gnn train", "0.50 x")]
    assert worsened(before, [row("mlp", FAILED)]) == ["mlp train: 1.00 x, now not measured"]


def test_bytecode_is_kept_as_where_we_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it each process compiles our 400 modules again: a second of a first step that no user has."""
    given: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        given.update(env)
        Path(command[-1]).write_text(json.dumps({}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(processes.subprocess, "run", run)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert processes.run_script("tiny", stock=True) == {}
    assert "PYTHONDONTWRITEBYTECODE" not in given
