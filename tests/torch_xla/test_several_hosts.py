"""Several hosts, as far as one machine without a TPU can show: torch-xla's CPU devices join no world, and that is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xlatrain.cluster.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
from tests.torch_xla.training import trainer
trainer("torch_xla", 2, num_nodes=2)
"""


@pytest.mark.slow
def test_processes_that_are_no_world_for_torch_xla_are_named() -> None:
    common = {name: value for name, value in os.environ.items() if name != "XLA_USE_SPMD"}
    common |= {"CPU_NUM_DEVICES": "2", "XLATRAIN_COORDINATOR": f"localhost:{free_port()}", "XLATRAIN_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={**common, "XLATRAIN_PROCESS_ID": str(index)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in processes:
        _, error = process.communicate(timeout=240)
        assert process.returncode == 1, error[-2000:]
        assert "2 process(es) joined, which are 0 of 1, 0 of 1 for torch_xla; start one process per host" in error
