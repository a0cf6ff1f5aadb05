"""Scripts that run once under Lightning and once under torch_compat, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def results_of(script: str | Path, package: str, *, timeout_s: float = 300) -> dict[str, Any]:
    """The JSON in the last line that ``script PACKAGE`` prints."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, str(script), package]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
