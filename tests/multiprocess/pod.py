"""Runs a script of ``scripts/`` as a pod on this machine: through the launcher itself, or forked from what has the imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import compiling, warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 240


def environment(*, quickly: bool = True) -> dict[str, str]:
    """This process's environment, with the packages importable and without what the tests set for themselves."""
    env = {name: value for name, value in compiling.environment(quickly=quickly).items() if name != "JAX_PLATFORMS"}
    return env | {"PYTHONPATH": str(ROOT)}


def run(command: list[str], processes: int, devices: int, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``xlatrain launch`` of a command; its output is one text."""
    launcher = [sys.executable, "-m", "xlatrain.cli", "launch", "--processes", str(processes)]
    return subprocess.run(
        [*launcher, "--devices-per-process", str(devices), *options, *command],
        env=environment() | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def results(script: str, processes: int, devices: int, directory: Path, *arguments: str, quickly: bool = True) -> list[Any]:
    """The results of each process of ``scripts/<script>.py``, which writes JSON to ``<directory>/<process id>.json``.

    Args:
        quickly: as in :func:`tests.compiling.environment`.
    """
    directory.mkdir(exist_ok=True)
    command = [str(SCRIPTS / f"{script}.py"), str(directory), *arguments]
    done = warm.run_pod(command, processes, devices, env=environment(quickly=quickly), timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout
    return [json.loads((directory / f"{p}.json").read_text()) for p in range(processes)]
