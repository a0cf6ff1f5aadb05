"""A launch goes on with fewer processes when some are killed, and takes them in again."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from xlatrain.cli.launch import main
from xlatrain.cluster.elastic import launch_elastic

WORKER = """
import os, pathlib, signal, sys, time
folder, me, count = pathlib.Path(sys.argv[1]), int(os.environ["XLATRAIN_PROCESS_ID"]), int(os.environ["XLATRAIN_PROCESSES"])
world = os.environ["XLATRAIN_COORDINATOR"].partition(":")[2]
print("process", me, "of", count, "of", os.environ["XLATRAIN_ELASTIC"], "since" if os.environ["XLATRAIN_RESUME_SINCE"] else "")
def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
(folder / f"{world}.{me}").touch()
wait_for(*[f"{world}.{one}" for one in range(count)])
worlds = len({one.stem for one in folder.glob("*.*")})
"""
LOSES = (
    WORKER
    + """
if worlds == 1 and me == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if worlds < 3:
    time.sleep(600)
"""
)
FAILS = (
    WORKER
    + """
sys.exit(3)
"""
)
DIES = (
    WORKER
    + """
if me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
)


def run(program: str, folder: Path, least: int, most: int, **options: Any) -> tuple[int, str]:
    output = io.StringIO()
    status = launch_elastic([sys.executable, "-c", program, str(folder)], least, most, output=output, **options)
    return status, output.getvalue()


def test_the_others_go_on_and_the_lost_one_is_taken_in_again(tmp_path: Path) -> None:
    status, said = run(LOSES, tmp_path, 2, 3, rejoin_after=0.5)
    assert status == 0, said
    lines = said.splitlines()
    worlds = [
        sorted(one.name.rpartition(".")[2] for one in tmp_path.glob(f"{name}.*")) for name in {p.stem for p in tmp_path.iterdir()}
    ]
    assert sorted(map(len, worlds)) == [2, 3, 3], said
    assert "[launch] lost [1]; going on with 2 of 3 processes from the newest checkpoint" in lines
    assert "[launch] process(es) [1] may come back: the others save, to go on together" in lines
    assert "[2] process 1 of 2 of 3 since" in lines  # the slot stays, the number in the world is another


def test_with_too_few_it_waits_and_a_script_that_always_dies_is_given_up(tmp_path: Path) -> None:
    status, said = run(DIES, tmp_path, 2, 2, rejoin_after=0.1)
    assert status == 128 + 9
    assert "going on with 1 of 2 processes from the newest checkpoint, fewer than 2: waiting until some come back" in said
    assert said.endswith("[launch] 5 worlds in a row lost a process within 30 s: giving up\n")


def test_an_error_is_no_loss(tmp_path: Path) -> None:
    status, said = run(FAILS, tmp_path, 1, 2, max_restarts=1)
    assert status == 3
    assert "lost" not in said and "[launch] starting again (1 of 1)" in said and "of 1 of 2" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--elastic", "3:2"], "--elastic takes MIN:MAX, numbers of processes with 1 <= MIN <= MAX, e.g. 6:8; not '3:2'"),
        (["--elastic", "2:3", "--processes", "3"], "leave --processes out"),
        (["--elastic", "2:3", "--hosts", "a,b"], "--elastic does nothing here (ssh): it is for this machine"),
        (["--processes", "3", "--rejoin-after", "5"], "--rejoin-after is for --elastic MIN:MAX"),
        (["--processes", "3", "--memory-steps", "5"], "--memory-steps is for --elastic MIN:MAX"),
        (["--elastic", "1:3", "--memory-steps", "0"], "memory_steps=0 with 3 process(es) at most: expected at least 1 step"),
        (["--elastic", "1:1", "--memory-steps", "5"], "and 2 processes, which are neighbours"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "script.py"]) == 2
    assert said in capsys.readouterr().err


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="no fewer at most, not 3:2"):
        launch_elastic(["true"], 3, 2, environment=os.environ)
    with pytest.raises(ValueError, match="rejoin_after at least 0"):
        launch_elastic(["true"], 1, 2, rejoin_after=-1)
