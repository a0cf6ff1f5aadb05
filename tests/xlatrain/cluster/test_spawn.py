"""Spawned worlds: results, errors, deaths, interruptions; nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.processes import PATIENCE_S, gone, wait_for
from xlatrain.cluster import distributed
from xlatrain.cluster.spawn import SpawnedProcessError, spawn

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def world(factor: int, add: int = 0) -> dict[str, object]:
    """The world as a process sees it."""
    return {
        "gathered": distributed.all_gather_object(jax.process_index() * factor + add),
        "devices": [jax.device_count(), jax.local_device_count()],
        "group": os.getpgid(0) == os.getpid(),
        "extra": os.environ["EXTRA"],
    }


def fails_in_one(how: str) -> None:
    """Process 1 fails while the others wait for it."""
    if jax.process_index() == 1:
        if how == "raise":
            raise ValueError("process 1 cannot go on")
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier("never reached by all")


def test_a_function_runs_in_one_world_and_its_result_comes_back() -> None:
    found = spawn(world, (10,), {"add": 1}, processes=2, devices_per_process=2, environment=lambda i: {"EXTRA": f"for {i}"})
    assert found == {"gathered": [1, 11], "devices": [4, 2], "group": True, "extra": "for 0"}
    assert "EXTRA" not in os.environ


@pytest.mark.parametrize(("how", "message"), [("raise", "ValueError: process 1 cannot go on"), ("kill", "was ended by SIGKILL")])
def test_a_failure_ends_all_and_says_where(how: str, message: str) -> None:
    with pytest.raises(SpawnedProcessError, match=message) as caught:
        spawn(fails_in_one, (how,), processes=2)
    assert caught.value.process_id == 1
    if how == "raise":
        assert 'raise ValueError("process 1 cannot go on")' in str(caught.value)
    assert multiprocessing.active_children() == [] and gone(caught.value.pid)


def test_what_cannot_be_sent_is_an_error_before_anything_starts() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local object|lambda"):
        spawn(lambda: None, processes=1)
    with pytest.raises(ValueError, match="processes must be at least 1, not 0"):
        spawn(world, processes=0)


SLEEPER = """
import os, sys, time
from pathlib import Path
from xlatrain.cluster.spawn import spawn

def sleep(folder):
    import jax
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(300)

if __name__ == "__main__":
    spawn(sleep, (sys.argv[1],), processes=2, grace_s=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_an_interrupted_or_killed_parent(number: signal.Signals, tmp_path: Path) -> None:
    script, folder = tmp_path / "sleeper.py", tmp_path / "pids"
    script.write_text(SLEEPER)
    folder.mkdir()
    root = str(Path(__file__).parents[3])
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"} | {"PYTHONPATH": root}
    parent = subprocess.Popen([sys.executable, str(script), str(folder)], env=env, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(folder.iterdir())) == 2)
    children = [int(path.name) for path in folder.iterdir()]
    parent.send_signal(number)
    assert parent.wait(PATIENCE_S) == -number
    wait_for(lambda: all(map(gone, children)))
