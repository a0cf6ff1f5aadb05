"""An abnormal end does not wait for the other processes; a good one does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiprocess.pod import SCRIPTS, run
from tests.processes import gone, wait_for

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("status", 7, ""),
        ("message", 1, "the message"),
        ("exception", 1, "RuntimeError: the exception"),
        ("leave", 9, ""),
    ],
)
def test_abnormal_ends_are_seen_at_once(how: str, status: int, said: str) -> None:
    done = run([str(SCRIPTS / "ends.py"), how], 2, 1)  # would run into the test's time-out if process 1 waited
    assert done.returncode == status, done.stdout
    assert f"[launch] process 1 exited with status {status}; stopping the others" in done.stdout
    assert said in done.stdout
    assert "[1] unfinished line" in done.stdout
    assert ("other exit handlers ran" in done.stdout) == (how != "leave")
    [(folder, pid)] = re.findall(r"left: (\S+) (\d+)", done.stdout)
    assert Path(folder).exists() == (how == "leave")
    if how == "leave":
        Path(folder).rmdir()
    wait_for(lambda: gone(int(pid)))


def test_an_interrupt_ends_all_at_once() -> None:
    done = run([str(SCRIPTS / "ends.py"), "interrupt"], 2, 1)  # to the launcher, which passes it on
    assert done.returncode == 130, done.stdout
    assert "[launch] passing SIGINT on to 2 processes" in done.stdout
    assert done.stdout.count("KeyboardInterrupt") == 2
    assert "killing them" not in done.stdout


def test_an_exit_that_was_caught_is_no_end() -> None:
    done = run([str(SCRIPTS / "ends.py"), "well"], 2, 1)
    assert done.returncode == 0, done.stdout
    assert "[1] caught" in done.stdout
    assert done.stdout.count("ended well") == 2


def test_the_runner_sees_every_exit() -> None:
    done = run(["-m", "torch_compat", str(SCRIPTS / "raises_exit.py")], 2, 1)
    assert done.returncode == 7, done.stdout
    assert "[launch] process 1 exited with status 7; stopping the others" in done.stdout


def test_an_error_in_a_run_with_split_parameters_is_told(tmp_path: Path) -> None:
    """The process that fails does not wait for the others to read the parameters with it: they are in their next step."""
    done = run([str(SCRIPTS / "failing.py"), str(tmp_path), "one"], 2, 1)
    assert '[1] KeyError: "an error of the user\'s own"' in done.stdout
    assert "wait for each other in different calls" not in done.stdout
    # Who ends first gives the status: process 1 with its error, or process 0, which was told of it.
    assert done.returncode in (1, 69), done.stdout


def test_where_all_fail_alike_the_parameters_can_be_read(tmp_path: Path) -> None:
    done = run([str(SCRIPTS / "failing.py"), str(tmp_path), "all"], 2, 1)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('after "an error of the user\'s own": [-4.0]') == 2, done.stdout
