"""The long form of the drills here: ``make hostile``, or ``python -m tests.hostile --files 200 --damages 10000``.

It goes in pieces. After each the tally in ``--tally`` is written, and the same command goes on from there; ``--minutes M`` begins
no piece after so long. What must not happen ends it with an AssertionError that names the attack.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from tests.hostile import hangs, losses, tally, two_writers
from tests.hostile.damage import damages
from tests.hostile.named_classes import attempts, saboteur
from tests.hostile.tally import Tally
from tests.multiprocess import drill as fire_drill

VALUES = {"w": np.arange(6000, dtype=np.float32).reshape(200, 30), "b": np.arange(7)}
Found = collections.Counter[str]


def malicious_files(folder: Path, first: int, count: int) -> Found:
    """Load so many files that name what is to be called; nothing of it may be."""
    numbers = (37 * number for number in range(first, first + count))  # neighbours are of one kind
    saboteur(folder)
    sys.path.insert(0, str(folder))
    try:
        return collections.Counter(outcome for _, _, outcome in attempts(folder, numbers))
    finally:
        sys.path.remove(str(folder))


def damaged_files(folder: Path, first: int, count: int) -> Found:
    """Damage a checkpoint so often: no wrong value may be read, and ``verify`` may miss nothing."""
    from xlatrain import checkpoint

    checkpoint.save(folder / "a.ckpt", VALUES, {"note": b"host state"}, wait=True)
    found: Found = collections.Counter()
    for what, path in damages(folder / "a.ckpt", count, seed=first):
        try:
            intact = checkpoint.verify(path).intact
        except checkpoint.CheckpointError as error:
            found[type(error).__name__] += 1
        else:
            assert not intact, f"seed {first}: missed: {what}"
            found["found by verify"] += 1
        try:
            read = checkpoint.open_checkpoint(path).restore_numpy()
        except checkpoint.CheckpointError:
            continue
        assert all(np.array_equal(value, VALUES[name]) for name, value in read.items()), f"seed {first}: read wrong: {what}"
        found["and read right"] += 1
    return found


def killed_writers(folder: Path, first: int, count: int) -> Found:
    """Four processes save to one path and so many of them are killed; what is there is whole."""
    from xlatrain import checkpoint

    path = folder / "a.ckpt"
    ends = two_writers.drill(path, writers=4, saves=10, seed=first * 10, kills=count)
    assert ends == ["saved all"] * (4 - count), ends
    checkpoint.verify(path).raise_if_damaged()
    return collections.Counter({"killed": count, "others saved all": 4 - count})


def killed_runs(folder: Path, first: int, count: int) -> Found:
    """A run of four processes is ended so often and started again; the storage changes from piece to piece."""
    storage = fire_drill.STORAGES[first // count % len(fire_drill.STORAGES)]
    ways = ("SIGKILL of one process", "SIGKILL of all processes", "SIGTERM")
    kinds = [ways[number % len(ways)] for number in range(first, first + count)]
    done = fire_drill.drill(folder, kinds, 4, 1, fire_drill.Drill(first), storage=storage)
    found = collections.Counter(f"{storage}: {end.how}" for end in done.ended)
    return found + collections.Counter({"runs as the undisturbed one": len(done.finished)})


DRILLS: dict[str, tuple[Callable[[Path, int, int], Found], int]] = {
    "malicious files": (malicious_files, 50),
    "damages": (damaged_files, 250),
    "killed writers": (killed_writers, 3),
    "hangs": (hangs.drill, 2),
    "lost processes": (losses.drill, 5),
    "killed runs": (killed_runs, 5),
}
"""Each drill, and how much of it is one piece."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--damages", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--hangs", type=int, default=len(hangs.hangs()))
    parser.add_argument("--losses", type=int, default=50, help="of processes and hosts, in elastic runs of eight")
    parser.add_argument("--ends", type=int, default=1000, help="of runs of four processes, by signals")
    parser.add_argument("--tally", type=Path, default=Path("build/hostile.json"), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    wanted = dict(zip(DRILLS, (asked.files, asked.damages, asked.kills, asked.hangs, asked.losses, asked.ends), strict=True))
    tallies, end = tally.read(asked.tally), time.monotonic() + 60 * asked.minutes
    for name, (drill, piece) in DRILLS.items():
        so_far = tallies.setdefault(name, Tally())
        while so_far.done < wanted[name] and time.monotonic() < end:
            count, started = min(piece, wanted[name] - so_far.done), time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                found = drill(Path(folder), so_far.done, count)
            so_far.add(count, time.monotonic() - started, found)
            tally.write(asked.tally, tallies)
        print(f"{name}: {so_far}", flush=True)


if __name__ == "__main__":
    main()
