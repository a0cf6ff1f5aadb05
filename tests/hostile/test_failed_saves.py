"""A save that fails is one line, which says what was wrong with the storage and what to do; nobody else prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, resource, shutil, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
import numpy as np
from xlatrain import checkpoint
from xlatrain.checkpoint import saving

path, what = sys.argv[1:]
rng = np.random.default_rng(0)
checkpoint.save(path + "/a.ckpt", {"w": rng.standard_normal(100)}, wait=True)
if what == "space":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
if what == "descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2,) * 2)
if what == "directory":  # removed when the arrays are written
    write = saving.write_manifest
    saving.write_manifest = lambda *arguments: (shutil.rmtree(path), write(*arguments))
try:
    pending = checkpoint.save(path + "/a.ckpt", {f"w{i}": rng.standard_normal((600, 1000)) for i in range(12)})
    pending.wait()
except checkpoint.CheckpointError as error:
    print(error, flush=True)
    os._exit(0)  # without descriptors a thread of Orbax waits for another, which could not start, until its own time-out
"""

SAID = {
    "space": ("File too large (free space, then save again)", "is intact"),
    "descriptors": ("Too many open files (raise the limit of open files", "is intact"),
    "directory": ("No such file or directory (was the directory removed", "is gone with the directory"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SAID)
def test_a_failed_save_is_one_line(tmp_path: Path, what: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "XLATRAIN_VERBOSE"}
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), what], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1 and len(done.stdout) < 800
    for part in SAID[what]:
        assert part in done.stdout


@pytest.mark.slow
def test_everything_is_shown_when_asked_for(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "space"],
        cwd=ROOT,
        env={**os.environ, "XLATRAIN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(done.stderr.splitlines()) > 20 and "File too large" in done.stdout
