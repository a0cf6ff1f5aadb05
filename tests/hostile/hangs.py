"""Hangs of one process of two, by combination: where it comes to a halt, how, and which process it is.

The others must learn its name, and its stack, within :data:`SLOW_S` and a moment, and all must end.
"""

from __future__ import annotations

import collections
import itertools
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.multiprocess import pod
from tests.processes import PATIENCE_S
from tests.warm import OURS, Child, server
from xlatrain.cluster.launch import child_environment, free_port
from xlatrain.cluster.watch import LOST_PEER

PLACES = (
    "training_step", "the loader", "on_train_batch_end", "a worker of the loader", "on_validation_start", "on_save_checkpoint",
    "collate_fn", "on_train_batch_start", "configure_optimizers", "the loader for validation", "on_before_optimizer_step",
    "on_train_epoch_end", "setup", "validation_step", "on_validation_batch_end", "on_train_start", "on_fit_start",
    "on_train_epoch_start", "on_train_end",
)  # fmt: skip
KINDS = ("sleeps", "waits for a lock", "spins", "waits in a collective of its own")
IN_A_WORKER = ("sleeps", "waits for a lock", "spins")  # which has no world
ONLY_ON_0 = "log_metrics of a logger"

WHO = r"process {} \(host \S+, pid {}\)"
SLOW_S, HANG_S, LIMIT_S = 2, 6, 150


class Hang(NamedTuple):
    """A process that comes to a halt."""

    place: str
    kind: str
    process: int


def hangs() -> list[Hang]:
    """All of them; neighbours differ in everything."""
    found = [Hang(ONLY_ON_0, kind, 0) for kind in KINDS]
    for place, kind, process in itertools.product(PLACES, KINDS, (0, 1)):
        if place != "a worker of the loader" or kind in IN_A_WORKER:
            found.append(Hang(place, kind, process))
    step = next(n for n in (43, 47, 53) if len(found) % n)
    return [found[step * i % len(found)] for i in range(len(found))]


def what_is_said(hang: Hang, folder: Path) -> str:
    """How the others learn of it: ``"named, with its stack"``, ``"at odds"``, or ``"named; it compiles"``, when nobody is ended.

    On a machine that is so busy that a process needs longer than the limits to come to its halt, they are doubled, and it is
    tried again.

    Raises:
        AssertionError: they do not, or somebody does not end.
    """
    for patience in (1, 2, 4, 8, 16, 32, 64):
        (folder / str(patience)).mkdir()
        pids, statuses, texts = _outcome(hang, folder / str(patience), patience)
        named = re.search(rf"xlatrain watch: .*{WHO.format(hang.process, pids[hang.process])} keeps the others", texts[0])
        too_early = named and hang.place != "a worker of the loader" and "come_to_a_halt" not in texts[0][named.start() :]
        if "halts" in texts[hang.process] and not too_early:
            break
    whole = f"{hang}, limits {patience} times as long\n" + "\n".join(texts)
    compiles = _compiles(hang)
    assert "halts" in texts[hang.process], whole
    assert compiles or (LOST_PEER in statuses and 0 not in statuses and None not in statuses), whole
    who = WHO.format(hang.process, pids[hang.process])
    if named and not too_early:
        return "named; it compiles" if compiles else "named, with its stack"
    assert re.search(rf"xlatrain watch: .*in different calls.*{who}", texts[0]) and "a place of its own" in texts[0], whole
    return "at odds"


def _compiles(hang: Hang) -> bool:
    """Whether it halts while its step is captured, where nobody need be ended: the others may compile meanwhile."""
    return hang.place in ("training_step", "validation_step")


def _outcome(hang: Hang, folder: Path, patience: int) -> tuple[list[int], list[int | None], list[str]]:
    """A run of it: of each process its id, its status, and what it said."""
    limits = {"XLATRAIN_SLOW_AFTER": str(SLOW_S * patience), "XLATRAIN_HANG_AFTER": str(HANG_S * patience)}
    port, outputs = free_port(), [folder / f"said.{process}" for process in (0, 1)]
    environments = [child_environment(pod.environment() | limits, process, 2, 1, port) for process in (0, 1)]
    command = [str(pod.SCRIPTS / "hung.py"), str(folder / "run"), hang.place, hang.kind, str(hang.process)]
    forks = server(OURS, environments[0])
    children = [forks.start(command, own, output) for own, output in zip(environments, outputs, strict=True)]
    try:
        statuses = _ends(children, outputs[0] if _compiles(hang) else None, LIMIT_S * patience)
    finally:
        for child in children:
            child.kill()
            child.wait(PATIENCE_S)
    return [child.pid for child in children], statuses, [output.read_text() for output in outputs]


def _ends(children: Sequence[Child], until_told: Path | None, limit_s: float) -> list[int | None]:
    """The statuses when all have ended; or when process 0 has told enough, where nobody is to be ended."""
    deadline = time.monotonic() + limit_s
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        if until_told is not None and "come_to_a_halt" in until_told.read_text():
            break
        time.sleep(0.05)
    return [child.poll() for child in children]


def drill(_: Path, first: int, count: int) -> collections.Counter[str]:
    """So many of them, from the ``first`` on."""
    found: collections.Counter[str] = collections.Counter()
    every = hangs()
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            found[what_is_said(every[number % len(every)], Path(folder))] += 1
    return found
