"""Optimizer state on a mesh that spans processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import warm

_ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_state_of_two_processes_to_torch_and_back(tmp_path: Path) -> None:
    script = Path(__file__).with_name("optimizer_process_script.py")
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = warm.run_pod([str(script), str(tmp_path)], 2, 2, env=environment, timeout=400)
    assert done.returncode == 0, done.stdout[-8000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done-0", "done-1"]
