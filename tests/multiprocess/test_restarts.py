"""A launch over several hosts (a stand-in ssh; everything behind it is real), started again after a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.pod import ROOT, SCRIPTS, environment
from tests.processes import gone, wait_for
from xlatrain.cluster.launch import free_port

pytestmark = pytest.mark.multiprocess
STAND_INS = Path(__file__).parent / "stand_ins"
LAUNCH = (sys.executable, "-m", "xlatrain.cli", "launch")


def over_ssh(*arguments: str) -> tuple[list[str], dict[str, str]]:
    command = [*LAUNCH, "--coordinator-port", str(free_port()), *arguments]
    return command, environment() | {"PATH": f"{STAND_INS}{os.pathsep}{os.environ['PATH']}"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command, env = over_ssh(*arguments)
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=env, **merged, text=True, timeout=240, check=False, cwd=ROOT)


@pytest.mark.slow
def test_a_run_on_two_hosts_continues_from_its_newest_checkpoint(tmp_path: Path) -> None:
    options = ("--hosts", "127.0.0.1,me@localhost", "--env", "JAX_PLATFORMS=cpu", "--env", "JAX_NUM_CPU_DEVICES=1")
    script = ("-m", "torch_compat", str(SCRIPTS / "restarted.py"))
    done = run(*options, "--max-restarts", "1", *script, str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "[0] host 127.0.0.1" in done.stdout
    assert "[1] host me@localhost" in done.stdout
    assert "process 1 on me@localhost exited with status 7; stopping the others" in done.stdout
    assert "[launch] starting again (1 of 1)" in done.stdout
    # Each of the script's first two runs goes on where it was: one was complete, the other had ended two epochs.
    assert re.findall(r"\[0\] epoch (\d)", done.stdout) == [*"001223", *"00123"]
    for process in (0, 1):
        disturbed, undisturbed = re.findall(rf"\[{process}\] (ended .*)", done.stdout)
        assert disturbed == undisturbed


def test_a_lost_launcher_or_host_leaves_nothing_behind() -> None:
    script = SCRIPTS / "sleeps.py"
    command, env = over_ssh("--hosts", "a,b", str(script))
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        assert launcher.stdout is not None
        pids: list[int] = []
        while len(pids) < 2:
            line = launcher.stdout.readline()
            assert line, "the launch ended"
            pids += [int(pid) for pid in re.findall(r"pid (\d+)", line)]
        launcher.kill()
    wait_for(lambda: all(gone(pid) for pid in pids))

    lost = run("--hosts", "a,unreachable", str(script))
    assert lost.returncode == 255
    assert "process 1 on unreachable exited with status 255; ssh could not connect" in lost.stdout
