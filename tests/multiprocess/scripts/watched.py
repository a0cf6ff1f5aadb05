"""Worlds of two processes that walk in step with each other, of which one comes to a bad end at its third step.

``watched.py DIRECTORY WORLDS``: WORLDS is a JSON list of ``[how, victim, variables]``. All run at once, as forks of a process
that has imported everything; process p of world w writes to ``DIRECTORY/w.p``. Printed: ``[[[pid, exit status], …], …]``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time

from xlatrain.cluster import distributed, watch
from xlatrain.cluster.launch import child_environment, free_port

PROCESSES = 2
LIMIT_S = 240


def come_to_a_bad_end(how: str) -> None:
    if how.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raises":
        raise RuntimeError("the disk is full")
    if how == "hangs":
        time.sleep(600)
    if how == "alone":
        distributed.barrier("a place of its own", timeout=600)


def walk(how: str, victim: int) -> None:
    world = distributed.initialize()
    with contextlib.nullcontext() if "outside" in how else watch.armed(hang_after=1800):
        for step in range(6):
            watch.progress.mark("in its step", step)
            if step == 3 and world.process_id == victim:
                come_to_a_bad_end(how)
            watch.progress.mark("after its step")
            distributed.barrier("step", timeout=600)
    print("finished", flush=True)


def become(output: str, env: dict[str, str]) -> None:
    for target in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    os.environ.update(env)


def statuses(pids: list[int], deadline: float) -> list[tuple[int, int]]:
    """The exit statuses of processes that all end, except for a frozen one, which is killed when the others have."""
    found: dict[int, int] = {}
    while len(found) < len(pids):
        for pid in pids:
            if pid not in found and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                found[pid] = os.waitstatus_to_exitcode(ended[1])
        if time.monotonic() > deadline or (found and all(_is_stopped(pid) for pid in pids if pid not in found)):
            for pid in set(pids) - set(found):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return [(pid, found[pid]) for pid in pids]


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


directory, worlds = sys.argv[1], json.loads(sys.argv[2])
children: list[list[int]] = []
role: tuple[str, int] | None = None
for number, (how, victim, env) in enumerate(worlds):
    port = free_port()
    children.append([])
    for process in range(PROCESSES):
        if pid := os.fork():
            children[-1].append(pid)
            continue
        become(f"{directory}/{number}.{process}", child_environment(dict(os.environ), process, PROCESSES, 1, port) | env)
        role = (how, victim)
        break
    if role is not None:
        break

if role is not None:
    walk(*role)
else:
    end = time.monotonic() + LIMIT_S
    print(json.dumps([statuses(pids, end) for pids in children]))
