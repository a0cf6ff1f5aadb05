"""``MPIEnvironment``, with a stand-in of mpi4py: two processes that nothing else tells of each other train as one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.multiprocess.pod import ROOT, SCRIPTS, TIMEOUT_S, environment
from tests.torch_compat.strategies.small import Net, loader, trainer, weights

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_processes_that_mpi_started(tmp_path: Path) -> None:
    stand_ins = Path(__file__).parent / "stand_ins"
    env = environment() | {"PYTHONPATH": f"{ROOT}:{stand_ins}", "STAND_IN_SIZE": "2", "STAND_IN_FOLDER": str(tmp_path)}
    command = [sys.executable, str(SCRIPTS / "mpi.py"), str(tmp_path)]
    processes = [
        subprocess.Popen(
            command, env=env | {"STAND_IN_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    trainer(devices=4).fit(net := Net(), loader(batch_size=4))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["ranks"] == [rank, rank, 0, 4] and found["detected"]
        torch.testing.assert_close(torch.tensor(found["weights"]), weights(net))
