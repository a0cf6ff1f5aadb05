"""The long form of the drills here: ``make hostile``, or ``python -m tests.hostile --files 200 --damages 10000``."""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from tests.hostile import two_writers
from tests.hostile.damage import damages
from tests.hostile.named_classes import attempts, saboteur

VALUES = {"w": np.arange(6000, dtype=np.float32).reshape(200, 30), "b": np.arange(7)}


def malicious_files(folder: Path, count: int) -> str:
    """Load at least so many files that name what is to be called; nothing of it may be."""
    saboteur(folder)
    sys.path.insert(0, str(folder))
    outcomes = collections.Counter(outcome for _, _, outcome in attempts(folder, every=max(1, 1800 // count)))
    return f"{sum(outcomes.values())} files: {dict(outcomes)}"


def damaged_files(folder: Path, count: int) -> str:
    """Damage a checkpoint so often: all of it is found, and no wrong value is read."""
    from xlatrain import checkpoint

    checkpoint.save(folder / "a.ckpt", VALUES, {"note": b"host state"}, wait=True)
    outcomes: collections.Counter[str] = collections.Counter()
    missed = []
    for what, path in damages(folder / "a.ckpt", count, seed=0):
        try:
            outcomes["found by verify"] += (found := not checkpoint.verify(path).intact)
            if not found:
                missed.append(what)
        except checkpoint.CheckpointError as error:
            outcomes[type(error).__name__] += 1
        try:
            read = checkpoint.open_checkpoint(path).restore_numpy()
        except checkpoint.CheckpointError:
            continue
        assert all(np.array_equal(value, VALUES[name]) for name, value in read.items()), what
    assert not missed, f"{len(missed)} were missed: {missed}"
    return f"{count} damages: {dict(outcomes)}"


def killed_writers(folder: Path, kills: int) -> str:
    """Four processes save to one path and some are killed, again and again; what is there is always whole."""
    from xlatrain import checkpoint

    done = rounds = 0
    while done < kills:
        now = min(3, kills - done)
        path = folder / f"{rounds}.ckpt"
        ends = two_writers.drill(path, writers=4, saves=10, seed=rounds * 10, kills=now)
        assert ends == ["saved all"] * (4 - now), ends
        checkpoint.verify(path).raise_if_damaged()
        done, rounds = done + now, rounds + 1
    return f"{done} of {4 * rounds} writers to one path were killed: no checkpoint was torn, and every other save committed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--damages", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=1000)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    drills = (malicious_files, arguments.files), (damaged_files, arguments.damages), (killed_writers, arguments.kills)
    for drill, count in drills:
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            said = drill(Path(folder), count) if count else "left out"
            print(f"{drill.__name__}: {said} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
