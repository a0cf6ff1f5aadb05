"""Processes that save to one path at once, some of them killed; ``-m tests.hostile.two_writers PATH SAVES SEED`` is one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write(path: str, saves: int, seed: int) -> None:
    """Save again and again; each save must be committed, and what is at the path then is somebody's whole save."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import numpy as np

    from xlatrain import checkpoint

    pause = random.Random(seed)
    for number in range(saves):
        value = seed * 1000 + number
        checkpoint.save(path, {"w": np.full(1000, value)}, {"host": str(value).encode()}, wait=True)
        time.sleep(pause.random() / 50)
    print("saved all", flush=True)


def drill(path: Path, writers: int, saves: int, seed: int, *, kills: int = 0) -> list[str]:
    """Start the writers, kill some, and say how each of the others ended: its last line on standard output."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(path), str(saves), str(seed + number)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(writers)
    ]
    chance = random.Random(seed)
    for child in children[:kills]:
        while not path.exists() and child.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.random())
        child.send_signal(signal.SIGKILL)
    ends = [child.communicate(timeout=300) for child in children]
    return [said.strip() or errors[-2000:] for said, errors in ends[kills:]]


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
