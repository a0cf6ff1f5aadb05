"""The fire drill: a training run of several processes is killed at random moments and started again until it finishes.

``python -m tests.multiprocess.drill --kills 50`` (``make fire-drill``) fails unless the run ends with the weights of the
undisturbed one, and unless every checkpoint that says it is complete is intact after every kill. With ``--record FILE`` it
writes what it has done after each kill, and goes on there when it is started again; ``--minutes M`` stops it after so long.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax

from tests.multiprocess import pod
from tests.warm import OURS, Server
from tests.xlatrain.checkpoint import object_store
from torch_compat.trainer.preemption import EXIT_STATUS, NAME
from xlatrain import checkpoint
from xlatrain.cluster.launch import child_environment, free_port

jax.config.update("jax_platforms", "cpu")  # the drill itself verifies checkpoints: not on an accelerator

SCRIPT = pod.SCRIPTS / "drill.py"
STORAGES = ("asynchronous", "tiered", "gs")
"""A directory; one, of which is copied what is committed; an object store in this process."""

LIMIT_S = 600


class World:
    """A start of the run.

    Args:
        server: starts its processes.
        saved: its checkpoints' directory.
        logs: directory for what its processes write.
        processes, devices: how many; devices of each process.
        told: further environment variables.
    """

    def __init__(
        self, server: Server, saved: str, logs: Path, processes: int, devices: int, told: Mapping[str, str] | None = None
    ) -> None:
        self.saved = saved
        self.told = dict(told or {})
        self.logs = Path(tempfile.mkdtemp(prefix="said-", dir=logs))
        common, port = pod.environment() | self.told, free_port()
        self.children = [
            server.start(
                [str(SCRIPT), saved],
                child_environment(common, process, processes, devices, port),
                self.logs / str(process),
            )
            for process in range(processes)
        ]

    def output(self, process: int = 0) -> list[str]:
        """Lines that a process has written; of the last one perhaps a part."""
        log = self.logs / str(process)
        return log.read_text().splitlines() if log.exists() else []

    def wait_for(self, said: str, count: int) -> bool:
        """False when the world has ended before process 0 has said that so many times."""
        deadline = time.monotonic() + LIMIT_S
        while sum(line.startswith(said) for line in self.output()) < count:
            if self.children[0].poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(self.output()[-20:]))
            time.sleep(0.003)
        return True

    def kill(self, victims: list[int]) -> None:
        """SIGKILL these at once; the others get a moment, as a scheduler gives them, and are killed too."""
        for victim in victims:
            self.children[victim].kill()
        if len(victims) < len(self.children):
            time.sleep(0.3)
        self.end()

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.wait(LIMIT_S)

    def statuses(self) -> list[int]:
        """The exit statuses of all processes; waits."""
        return [child.wait(LIMIT_S) for child in self.children]

    def result(self) -> str | None:
        """The output of the finished run."""
        self.statuses()
        found = [line for line in self.output() if re.fullmatch(r"finished \d+ [0-9a-f]{64}", line)]
        return found[0] if found else None


def undisturbed(server: Server, folder: Path, processes: int, devices: int) -> str:
    """The result of a run that nobody kills."""
    world = World(server, str(folder / "undisturbed"), folder, processes, devices)
    try:
        result = world.result()
    finally:
        world.end()
    assert result is not None, "\n".join(world.output()[-30:])
    return result


KINDS: dict[str, dict[str, str]] = {
    "SIGKILL of one process": {},
    "SIGKILL of all processes": {},
    "SIGTERM": {},
    "SIGTERM while a loader hangs": {"DRILL_HANGS_AFTER": "20"},
    "SIGTERM while the sanity check hangs": {"DRILL_HANGS_AFTER": "3", "DRILL_HANGS_IN": "sanity check"},
    "SIGTERM to JAX's preemption service": {"DRILL_SERVICE": "1"},
}
"""How a run is ended, and what it is told for that. SIGTERM to one process asks all of them to save and leave."""


@dataclass
class Ended:
    """How the run was ended once, and what was found.

    Attributes:
        how: one of :data:`KINDS`.
        after: the last thing that process 0 had said.
        newest_step: of the newest complete checkpoint, 0 without one.
        complete: checkpoints, every byte of which was right.
        moment: by what was left: ``"while writing"`` a payload that was not committed, ``"while removing"`` what a committed one
            replaced, or ``"between"`` two saves.
    """

    how: str
    after: str
    newest_step: int
    complete: int
    moment: str


@dataclass
class Drill:
    """The events of a drill so far.

    Attributes:
        seed: of the moments and victims.
        expected: what the undisturbed run printed.
        ended: each end.
        finished: runs that came to their end, each with the undisturbed one's weights: the number of ends before.
        seconds: that it has taken.
    """

    seed: int
    expected: str = ""
    ended: list[Ended] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    seconds: float = 0

    @classmethod
    def read(cls, record: Path) -> Drill:
        fields = json.loads(record.read_text())
        return cls(**fields | {"ended": [Ended(**one) for one in fields["ended"]]})


def drill(
    folder: Path,
    kinds: Sequence[str],
    processes: int,
    devices: int,
    so_far: Drill,
    record: Path | None = None,
    limit_s: float = 1e9,
    storage: str = STORAGES[0],
) -> Drill:
    """End the run in these ways, one after the other (a run that finishes before is begun anew), then let it finish."""
    if storage == "gs":
        object_store.connect(object_store.serve())
    with Server(OURS, pod.environment()) as server:
        return _drill(server, folder, kinds, processes, devices, so_far, record, limit_s, storage)


def _drill(
    server: Server,
    folder: Path,
    kinds: Sequence[str],
    processes: int,
    devices: int,
    so_far: Drill,
    record: Path | None,
    limit_s: float,
    storage: str,
) -> Drill:
    started, before = time.monotonic(), so_far.seconds
    if not so_far.expected:
        so_far.expected = undisturbed(server, folder, processes, devices)
    found, seen = 0, set[str]()
    while True:
        rest = kinds[len(so_far.ended) :] if time.monotonic() - started < limit_s else ()
        run = folder / f"run-{len(so_far.finished)}"
        saved = f"gs://bucket/{run.name}" if storage == "gs" else str(run)
        choice = random.Random(so_far.seed * 1000 + len(so_far.ended) * 10 + len(so_far.finished))
        told = {"DRILL_STORAGE": storage} | (KINDS[rest[0]] if rest else {})
        world = World(server, saved, folder, processes, devices, told)
        try:
            point = ("hangs", 1) if "DRILL_HANGS_AFTER" in world.told else ("step ", choice.randrange(1, 9))
            if rest and world.wait_for(*point) and _ended(world, rest[0], choice):
                new = {name: what for name, what in _left_over(run).items() if name not in seen}
                seen |= set(new)
                moment = next(iter(new.values()), "between")
                if storage == "tiered" and choice.random() < 0.5 and checkpoint.newest(f"{saved}-durable") is not None:
                    shutil.rmtree(run)
                    found, moment = 1, f"{moment}, and the first tier is gone"
                so_far.ended.append(_examined(saved, rest[0], found, (world.output() or [""])[-1], moment))
                found = so_far.ended[-1].complete
            else:
                result = world.result()
                said = "\n".join(world.output()[-30:])
                assert result == so_far.expected, f"after {so_far.ended} {result}, undisturbed {so_far.expected}: {said}"
                so_far.finished.append(len(so_far.ended))
                found = 0
        finally:
            world.end()
        so_far.seconds = round(before + time.monotonic() - started)
        if record is not None:
            record.write_text(json.dumps(asdict(so_far), indent=1))
        if not rest:
            return so_far


def _ended(world: World, kind: str, choice: random.Random) -> bool:
    """End the run somewhere in the step, the copy, the write or the commit that follow; False if it was faster."""
    before = checkpoint.newest(world.saved)
    time.sleep(choice.random() * 0.2)
    victim = choice.randrange(len(world.children))
    if kind.startswith("SIGKILL"):
        world.kill(list(range(len(world.children))) if "all" in kind else [victim])
        return True
    world.children[victim].send_signal(signal.SIGTERM)
    statuses = world.statuses()
    if statuses == [0] * len(world.children):
        return False
    said = ["\n".join(world.output(process)[-20:]) for process in range(len(world.children))]
    assert statuses == [EXIT_STATUS] * len(world.children), f"{statuses}: " + "\n".join(said)
    saved = str(checkpoint.newest(world.saved)) == f"{world.saved}/{NAME}"
    nothing_new = checkpoint.newest(world.saved) == before and any("nothing new to save" in line for line in world.output())
    assert saved or nothing_new, "\n".join(said)
    return True


def _examined(saved: str, how: str, found: int, said: str, moment: str) -> Ended:
    """Read every byte of what says that it is complete; ``found`` checkpoints were complete before."""
    entries = [*checkpoint.entries(saved), *checkpoint.entries(f"{saved}-durable")]
    torn = [entry.path.name for entry in entries if entry.problem]
    assert not torn, f"{how}: {torn} say that they are complete, and are not"
    assert entries or not found, f"{how}: no complete checkpoint is left"
    for entry in entries:
        checkpoint.verify(entry.path).raise_if_damaged()
    newest = max(((entry.facts or {}).get("step", 0) for entry in entries), default=0)
    return Ended(how, said.replace(saved, "…"), newest, len(entries), moment)


def _left_over(run: Path) -> dict[str, str]:
    """Payloads that no commit record names → what was going on: it was being written, or removed after it was replaced."""
    found = {}
    for path in run.iterdir() if run.is_dir() else ():
        payloads = sorted(path.glob("payload-*"), key=lambda payload: payload.stat().st_mtime)
        committed = json.loads((path / "CURRENT").read_text())["payload"] if checkpoint.is_checkpoint_directory(path) else None
        for payload in payloads:
            if payload.name != committed:
                found[payload.name] = "while writing" if payload == payloads[-1] else "while removing"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    parser.add_argument("--storage", choices=STORAGES, default=STORAGES[0])
    parser.add_argument("--record", type=Path, help="file that is written after each kill, and read at the start")
    parser.add_argument("--minutes", type=float, default=1e6, help="end no run after so long, let the last one finish, and stop")
    args = parser.parse_args()
    so_far = Drill.read(args.record) if args.record is not None and args.record.exists() else Drill(args.seed)
    print(f"seed {so_far.seed}", flush=True)
    choice = random.Random(so_far.seed)
    kinds = [choice.choice(list(KINDS)) for _ in range(args.kills)]
    with tempfile.TemporaryDirectory() as folder:
        done = drill(Path(folder), kinds, args.processes, args.devices, so_far, args.record, args.minutes * 60, args.storage)
    print(f"{len(done.ended)} of {args.kills} ends, {len(done.finished)} runs finished as the undisturbed one, {done.seconds} s")
    for of in ("how", "moment"):
        print(dict(collections.Counter(getattr(end, of) for end in done.ended)))


if __name__ == "__main__":
    main()
