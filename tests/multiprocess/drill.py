"""The fire drill: a training run of several processes is killed at random moments and started again until it finishes.

``python -m tests.multiprocess.drill --kills 50`` (``make fire-drill``) says after how many kills the run had the weights of the
undisturbed one, and fails if it had not, or if after any kill no complete checkpoint was left where there had been one.
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
from dataclasses import dataclass, field
from pathlib import Path

import jax

from tests.multiprocess import pod
from xlatrain import checkpoint
from xlatrain.launch import child_environment

jax.config.update("jax_platforms", "cpu")  # the drill itself verifies checkpoints: not on an accelerator

SCRIPT = pod.SCRIPTS / "drill.py"
LIMIT_S = 180


@dataclass
class World:
    """One start of the run."""

    folder: Path
    processes: int
    devices: int
    output: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.children = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.folder), "0.02"],
                env=child_environment(pod.environment(), process, self.processes, self.devices, port),
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

    def wait_for_steps(self, count: int) -> bool:
        """False when the world has ended before that many steps."""
        deadline = time.monotonic() + LIMIT_S
        while sum(line.startswith("step ") for line in self.output) < count:
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


def drill(folder: Path, kills: int, processes: int, devices: int, seed: int) -> dict[str, object]:
    """Kill the run so many times (a run that finishes before is begun anew), then let it finish; what happened."""
    choice = random.Random(seed)
    expected = undisturbed(folder / "undisturbed", processes, devices)
    done, runs, after, found = 0, 0, [], 0
    run = folder / "run-0"
    while True:
        world = World(run, processes, devices)
        try:
            if done < kills and world.wait_for_steps(choice.randrange(1, 12)):
                time.sleep(choice.random() * 0.05)  # somewhere in the step, the copy, the write or the commit that follow
                world.kill(list(range(processes)) if choice.random() < 0.5 else [choice.randrange(processes)])
                done += 1
                complete = [entry for entry in checkpoint.entries(run) if not entry.problem] if run.is_dir() else []
                torn = [entry.path.name for entry in checkpoint.entries(run) if entry.problem] if run.is_dir() else []
                assert not torn, f"kill {done}: {torn} say that they are complete, and are not"
                assert complete or not found, f"kill {done}: no complete checkpoint is left"
                found = len(complete)
                for entry in complete:
                    checkpoint.verify(entry.path).raise_if_damaged()
                after.append(max((entry.facts or {}).get("step", 0) for entry in complete) if complete else 0)
                continue
            result = world.result()
        finally:
            world.end()
        assert result == expected, f"after {done} kills {result}, undisturbed {expected}: " + "\n".join(world.output[-30:])
        runs += 1
        if done >= kills:
            return {"kills": done, "finished_runs": runs, "newest_step_after_each_kill": after, "result": expected}
        run, found = folder / f"run-{runs}", 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = drill(Path(folder), args.kills, args.processes, args.devices, args.seed)
    print(json.dumps({**found, "seconds": round(time.monotonic() - started), "seed": args.seed}))


if __name__ == "__main__":
    main()
