"""Processes of one world look after each other: who is lost is named, with host and step, and everybody's stacks are shown."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.multiprocess.pod import SCRIPTS, environment
from xlatrain.cluster.watch import LOST_PEER

pytestmark = pytest.mark.multiprocess

WHO = r"process {victim} \(host \S+, pid {pid}\) "
WITHOUT_A_WORD = WHO + "ended without a word .*, last heard of at step"


class Case(NamedTuple):
    """How a process of two ends, and what the others say of it."""

    victim: int
    said: str
    status: int
    env: dict[str, str] = {}  # noqa: RUF012


SOON = {"XLATRAIN_HANG_AFTER": "12"}
CASES = {
    "killed": Case(1, WITHOUT_A_WORD, -signal.SIGKILL),
    "killed, it is process 0": Case(0, WITHOUT_A_WORD, -signal.SIGKILL),
    "killed, it is process 0, outside of a run": Case(0, WITHOUT_A_WORD, -signal.SIGKILL),
    "hangs": Case(1, WHO + r"hangs: \d+ s at step 3 \(in its step\); waiting for it: process 0 ", 69, SOON),
    "raises": Case(1, WHO + r"ended with RuntimeError: the disk is full, last heard of at step 3", 1),
    "frozen": Case(
        1,
        WHO + r"has given no sign of life for \d+ s",
        -signal.SIGKILL,
        {"XLATRAIN_DEAD_AFTER": "10"},
    ),
    "alone": Case(
        1,
        r"in different calls, which all must make: process 0 .* in 'step, call 4' \(step 3\); "
        + WHO
        + r"in 'a place of its own' \(step 3\) \(is one under is_global_zero\?\)",
        LOST_PEER,
        SOON,
    ),
}  # fmt: skip


class Outcome(NamedTuple):
    pid: int
    status: int
    output: str


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """The outcomes of the processes of each case. They run at once, without a launcher, which would stop the others itself."""
    directory = tmp_path_factory.mktemp("watched")
    worlds = json.dumps([[name, case.victim, case.env] for name, case in CASES.items()])
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "watched.py"), str(directory), worlds],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {
        name: [
            Outcome(one[0], one[1], (directory / f"{world}.{process}").read_text()) for process, one in enumerate(found[world])
        ]
        for world, name in enumerate(CASES)
    }


@pytest.mark.parametrize("name", CASES)
def test_a_lost_process_is_named_and_the_others_show_their_stacks(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    case, ends = CASES[name], outcomes[name]
    pid = ends[case.victim].pid
    assert ends[case.victim].status == case.status, ends[case.victim].output
    for process, (_, status, output) in enumerate(ends):
        assert "finished" not in output
        if process == case.victim and case.status != LOST_PEER:
            continue
        assert status == LOST_PEER, output
        assert re.search(f"xlatrain watch: .*{case.said.format(victim=case.victim, pid=pid)}", output), output
        assert f"xlatrain watch: stacks of process {process} (host" in output
        if "outside" not in name:  # there a broken barrier may have ended the script's own frames before
            assert "watched.py" in output.split("xlatrain watch: stacks of")[1]
        assert ("come_to_a_bad_end" in output) == (process == case.victim)
