"""The run report: what really ran, as JSON in the file that ``XLATRAIN_REPORT`` names (DESIGN 5.14)."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("xlatrain", "torch", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")
_runs: list[dict[str, Any]] = []


def add_run(run: dict[str, Any]) -> None:
    """Add one run and, on process 0, write the report of all runs of this process so far, where it was asked for."""
    path = os.environ.get("XLATRAIN_REPORT")
    if not path:
        return
    _runs.append(run)
    if jax.process_index() != 0:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"runs": _runs, "versions": versions()}, indent=1))
    temporary.replace(target)


def versions() -> dict[str, str]:
    """Installed versions of what numbers depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
