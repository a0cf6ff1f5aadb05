"""Tests that share fixtures run in one worker, and the groups with slow tests last."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.groups import group_of

ROOT = Path(__file__).parents[1]
FILE = """
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_fast(number): ...

{mark}
def test_last(): ...
"""


def test_a_file_stays_in_one_worker_and_slow_ones_come_last(tmp_path: Path) -> None:
    for name, mark, count in (("a", "@pytest.mark.slow", 9), ("b", "", 6), ("c", "", 6)):
        (tmp_path / f"test_{name}.py").write_text(FILE.format(mark=mark, count=count))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.groups", "-n", "2", "--dist", "loadgroup"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"\[(gw\d)\] .*PASSED test_(.)\.py", done.stdout)
    assert len(ran) == 24
    worker = {name: gw for gw, name in ran}
    assert set(ran) == {(gw, name) for name, gw in worker.items()}
    assert worker["b"] != worker["c"]  # the first to start, since neither holds a slow test


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/test_demo.py::test_demo", "tests/test_demo.py"),
        ("tests/x/test_y.py::TestZ::test_a[b-c]", "tests/x/test_y.py"),
        ("tests/parity/test_parity.py::test_same_as_stock[raw_loops-gan-one device]", "tests/parity/test_parity.py raw_loops"),
        ("tests/parity/test_parity.py::test_two_processes_same_as_stock[models]", "tests/parity/test_parity.py models"),
        ("tests/parity/test_parity.py::test_differences_are_found", "tests/parity/test_parity.py"),
    ],
)
def test_groups_are_files_and_scripts_of_parity(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group
