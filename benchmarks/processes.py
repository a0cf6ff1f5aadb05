"""Runs a benchmark script in a process of its own, under stock Lightning or under ``torch_compat``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1200


def run_script(
    name: str, *flags: str, stock: bool = False, settings: Mapping[str, str] | None = None, one_core: bool = False
) -> dict[str, Any]:
    """The output of ``benchmarks/scripts/<name>.py`` in its ``--out``; ``settings`` are environment variables.

    Raises:
        RuntimeError: the script failed, or was not compiled; the text has its error output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, report = Path(folder) / "out.json", Path(folder) / "report.json"
        prefix = [] if stock else ["-m", "torch_compat"]
        pinned = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if one_core else []
        command = [
            *pinned,
            sys.executable,
            *prefix,
            str(ROOT / "benchmarks" / "scripts" / f"{name}.py"),
            *flags,
            "--out",
            str(out),
        ]
        # No compilation cache: what is compiled must be compiled.
        fixed = {"XLATRAIN_REPORT": str(report), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks" / "scripts")])
        environment = {**os.environ, **fixed, **(settings or {}), "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # stock has its bytecode, and so have we where we are installed
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"benchmark {name} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
        result = json.loads(out.read_text())
        if not stock:
            executors = {run["executor"] for run in json.loads(report.read_text())["runs"]}
            if executors != {"compiled"}:
                raise RuntimeError(f"benchmark {name} ran on {executors}, not compiled:\n{done.stderr[-4000:]}")
        return result
