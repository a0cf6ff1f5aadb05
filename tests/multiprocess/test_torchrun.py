"""The world as torchrun starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.pod import SCRIPTS, TIMEOUT_S, environment

pytestmark = pytest.mark.multiprocess


def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(SCRIPTS / "collectives.py")]
    env = environment() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run([*command, str(tmp_path)], env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    worlds = [json.loads((tmp_path / f"{p}.json").read_text())["world"] for p in range(3)]
    assert worlds == [[p, 3, p, p, 3] for p in range(3)]
