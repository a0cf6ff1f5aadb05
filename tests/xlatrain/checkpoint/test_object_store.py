"""Checkpoints at ``gs://``: in a process of its own, since TensorStore reads where the store is once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("object_store.py")
ROOT = PROGRAM.parents[3]


def test_an_object_store() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
