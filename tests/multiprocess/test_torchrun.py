"""The world as torchrun starts it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.multiprocess.pod import SCRIPTS, TIMEOUT_S, environment
from xlatrain.cluster.launch import free_port

pytestmark = pytest.mark.multiprocess


def test_torchrun(tmp_path: Path) -> None:
    """No port beside the agent's is taken to be free: process 0 says in the agent's store where it listens."""
    port, next_one = _neighbours()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(port)]
    command += [str(SCRIPTS / "collectives.py"), str(tmp_path)]
    env = environment() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with next_one:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    worlds = [json.loads((tmp_path / f"{p}.json").read_text())["world"] for p in range(3)]
    assert worlds == [[p, 3, p, p, 3] for p in range(3)]


def _neighbours() -> tuple[int, socket.socket]:
    """A free port, and a listener on the next one."""
    while True:
        port = free_port()
        with suppress(OSError):
            return port, socket.create_server(("", port + 1))
