"""Processes of one world look after each other: who is lost is named, with host and step, and everybody's stacks are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.multiprocess.pod import SCRIPTS, environment
from xlatrain.launch import child_environment, free_port
from xlatrain.watch import LOST_PEER

pytestmark = pytest.mark.multiprocess


@contextmanager
def started(arguments: list[str], processes: int, **env: str) -> Iterator[list[subprocess.Popen[str]]]:
    """``watched.py`` without a launcher, which would stop the others itself."""
    port = free_port()
    children = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "watched.py"), *arguments],
            env=child_environment(environment(), process, processes, 1, port) | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.communicate()


def outcome(child: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = child.communicate(timeout=120)
    return child.returncode, output


@pytest.mark.parametrize(
    ("how", "victim", "said", "status"),
    [
        ("killed", 1, r"ended without a word .*, last heard of at step", -9),
        ("killed", 0, r"ended without a word .*, last heard of at step", -9),
        ("hangs", 1, r"hangs: \d+ s at step 3 \(in its step\); waiting for it: process 0 ", LOST_PEER),
        ("raises", 1, r"ended with RuntimeError: the disk is full, last heard of at step 3 \(in its step\)", 1),
    ],
)
def test_a_lost_process_is_named_and_the_others_show_their_stacks(how: str, victim: int, said: str, status: int) -> None:
    with started([how, str(victim)], 2, XLATRAIN_HANG_AFTER="2") as children:
        outcomes = [outcome(child) for child in children]
        pid = children[victim].pid
    assert outcomes[victim][0] == status, outcomes[victim][1]
    for process, (code, output) in enumerate(outcomes):
        if process == victim and how != "hangs":
            continue
        # Where process 0 dies, JAX ends the others at the same moment: its SIGABRT may come between our words and our exit.
        assert code == LOST_PEER or (victim == 0 and code == -6), output
        assert re.search(rf"xlatrain watch: process {victim} \(host \S+, pid {pid}\) {said}", output), output
        assert f"xlatrain watch: stacks of process {process} (host" in output
        assert "watched.py" in output.split("xlatrain watch: stacks of")[1]
        assert ("come_to_a_bad_end" in output) == (process == victim)
        assert "finished" not in output


def test_a_frozen_process_is_named_when_it_gives_no_sign_of_life() -> None:
    with started(["frozen", "1"], 2, XLATRAIN_DEAD_AFTER="1") as children:
        code, output = outcome(children[0])
        pid = children[1].pid
    assert code == LOST_PEER, output
    assert re.search(rf"process 1 \(host \S+, pid {pid}\) has given no sign of life for \d+ s", output), output
