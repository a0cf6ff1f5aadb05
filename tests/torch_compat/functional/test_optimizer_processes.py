"""Optimizer state on a mesh that spans processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_state_of_two_processes_to_torch_and_back(tmp_path: Path) -> None:
    script = Path(__file__).with_name("optimizer_process_script.py")
    done = subprocess.run(
        [sys.executable, "-m", "xlatrain.cli", "launch", "--processes", "2", "--devices-per-process", "2", script, tmp_path],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done-0", "done-1"]
