"""The fire drill: a training run of several processes is killed at random moments and started again until it finishes.

``python -m tests.multiprocess.drill --kills 50`` (``make fire-drill``) fails unless the run ends with the weights of the
undisturbed one, and unless every checkpoint that says it is complete is intact after every kill. With ``--record FILE`` it
writes what it has done after each kill, and goes on there when it is started again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax

from tests.multiprocess import pod
from torch_compat.trainer.preemption import EXIT_STATUS, NAME
from xlatrain import checkpoint
from xlatrain.launch import child_environment

jax.config.update("jax_platforms", "cpu")  # the drill itself verifies checkpoints: not on an accelerator

SCRIPT = pod.SCRIPTS / "drill.py"
LIMIT_S = 600


@dataclass
class World:
    """One start of the run."""

    folder: Path
    processes: int
    devices: int
    told: dict[str, str] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.children = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.folder)],
                env=child_environment(pod.environment() | self.told, process, self.processes, self.devices, port),
                stdout=subprocess.PIPE if process == 0 else subprocess.DEVNULL,
                stderr=subprocess.STDOUT if process == 0 else subprocess.DEVNULL,
                text=True,
            )
            for process in range(self.processes)
        ]
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.children[0].stdout is not None
        for line in self.children[0].stdout:
            self.output.append(line.rstrip())

    def wait_for(self, said: str, count: int) -> bool:
        """False when the world has ended before process 0 has said that so many times."""
        deadline = time.monotonic() + LIMIT_S
        while sum(line.startswith(said) for line in self.output) < count:
            if self.children[0].poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(self.output[-20:]))
            time.sleep(0.003)
        return True

    def kill(self, victims: list[int]) -> None:
        """SIGKILL these at once; the others get a moment, as a scheduler gives them, and are killed too."""
        for victim in victims:
            self.children[victim].send_signal(signal.SIGKILL)
        if len(victims) < self.processes:
            time.sleep(0.3)
        self.end()

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
        self.reader.join()

    def result(self) -> str | None:
        """What the finished run printed."""
        self.children[0].wait(timeout=LIMIT_S)
        for child in self.children[1:]:
            child.wait(timeout=30)
        self.reader.join()
        found = [line for line in self.output if re.fullmatch(r"finished \d+ [0-9a-f]{64}", line)]
        return found[0] if found else None


def undisturbed(folder: Path, processes: int, devices: int) -> str:
    """The result of a run that nobody kills."""
    world = World(folder, processes, devices)
    try:
        result = world.result()
    finally:
        world.end()
    assert result is not None, "\n".join(world.output[-30:])
    return result


KINDS: dict[str, dict[str, str]] = {
    "SIGKILL of one process": {},
    "SIGKILL of all processes": {},
    "SIGTERM": {},
    "SIGTERM while a loader hangs": {"DRILL_HANGS_AFTER": "20"},
    "SIGTERM to JAX's preemption service": {"DRILL_SERVICE": "1"},
}
"""How a run is ended, and what it is told for that. SIGTERM to one process asks all of them to save and leave."""


@dataclass
class Drill:
    """What has happened so far.

    Attributes:
        seed: of the moments and victims.
        expected: what the undisturbed run printed.
        ended: how the run was ended each time.
        newest_step: after each end, the step of the newest complete checkpoint, 0 without one.
        finished_runs: runs that came to their end, each with the undisturbed one's weights.
    """

    seed: int
    expected: str = ""
    ended: list[str] = field(default_factory=list)
    newest_step: list[int] = field(default_factory=list)
    finished_runs: int = 0


def drill(folder: Path, kinds: Sequence[str], processes: int, devices: int, so_far: Drill, record: Path | None = None) -> Drill:
    """End the run in these ways, one after the other (a run that finishes before is begun anew), then let it finish."""
    if not so_far.expected:
        so_far.expected = undisturbed(folder / "undisturbed", processes, devices)
    found = 0
    while True:
        run = folder / f"run-{so_far.finished_runs}"
        choice = random.Random(so_far.seed * 1000 + len(so_far.ended) * 10 + so_far.finished_runs)
        rest = kinds[len(so_far.ended) :]
        world = World(run, processes, devices, KINDS[rest[0]] if rest else {})
        try:
            moment = ("hangs", 1) if "DRILL_HANGS_AFTER" in world.told else ("step ", choice.randrange(1, 9))
            if rest and world.wait_for(*moment) and _ended(world, rest[0], choice):
                found = _examine(run, found, so_far)
                so_far.ended.append(rest[0])
            else:
                result = world.result()
                said = "\n".join(world.output[-30:])
                assert result == so_far.expected, f"after {so_far.ended} {result}, undisturbed {so_far.expected}: {said}"
                so_far.finished_runs, found = so_far.finished_runs + 1, 0
        finally:
            world.end()
        if record is not None:
            record.write_text(json.dumps(asdict(so_far)))
        if not rest:
            return so_far


def _ended(world: World, kind: str, choice: random.Random) -> bool:
    """End the run somewhere in the step, the copy, the write or the commit that follow; False if it was faster."""
    time.sleep(choice.random() * 0.05)
    victim = choice.randrange(world.processes)
    if kind.startswith("SIGKILL"):
        world.kill(list(range(world.processes)) if "all" in kind else [victim])
        return True
    world.children[victim].send_signal(signal.SIGTERM)
    statuses = [child.wait(timeout=LIMIT_S) for child in world.children]
    world.reader.join()
    if statuses == [0] * world.processes:
        return False
    assert statuses == [EXIT_STATUS] * world.processes, f"{statuses}: " + "\n".join(world.output[-20:])
    assert checkpoint.newest(world.folder) == world.folder / NAME
    return True


def _examine(run: Path, found: int, so_far: Drill) -> int:
    """Read every byte of what says that it is complete; how many checkpoints that are."""
    kill = f"end {len(so_far.ended) + 1}"
    entries = checkpoint.entries(run) if run.is_dir() else []
    torn = [entry.path.name for entry in entries if entry.problem]
    assert not torn, f"{kill}: {torn} say that they are complete, and are not"
    assert entries or not found, f"{kill}: no complete checkpoint is left"
    for entry in entries:
        checkpoint.verify(entry.path).raise_if_damaged()
    so_far.newest_step.append(max(((entry.facts or {}).get("step", 0) for entry in entries), default=0))
    return len(entries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    parser.add_argument("--record", type=Path, help="file that is written after each kill, and read at the start")
    args = parser.parse_args()
    so_far = Drill(args.seed)
    if args.record is not None and args.record.exists():
        so_far = Drill(**json.loads(args.record.read_text()))
    print(f"seed {so_far.seed}", flush=True)
    choice = random.Random(so_far.seed)
    kinds = [choice.choice(list(KINDS)) for _ in range(args.kills)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = drill(Path(folder), kinds, args.processes, args.devices, so_far, args.record)
    counts = {kind: done.ended.count(kind) for kind in KINDS}
    print(json.dumps({**asdict(done), "ended": counts, "seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
