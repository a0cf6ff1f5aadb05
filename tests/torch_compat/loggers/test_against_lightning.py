"""Loggers write the files that Lightning's write; callbacks and loggers have Lightning's public names and signatures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.parity

_SCRIPT = Path(__file__).with_name("scripted_logging.py")
_ROOT = Path(__file__).parents[3]


def _run(package: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run([sys.executable, _SCRIPT, package], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, Any], dict[str, Any]]:
    return _run("torch_compat"), _run("lightning.pytorch")


@pytest.mark.parametrize("logger", ["log_csv", "log_tensorboard"])
def test_same_files(runs: tuple[dict[str, Any], dict[str, Any]], logger: str) -> None:
    ours, lightnings = (run[logger] for run in runs)
    assert any(name.endswith(("metrics.csv", "/scalars")) for name in lightnings)
    assert ours == lightnings


def test_same_names_and_directories(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert runs[0]["paths"] == runs[1]["paths"]


def test_same_public_api(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Every public name of Lightning's classes is there, with the same parameters, kinds and defaults."""
    ours, lightnings = (run["api"] for run in runs)
    different = {
        f"{kind}.{name}": {"ours": ours.get(kind, {}).get(name), "lightning": member}
        for kind, members in lightnings.items()
        for name, member in members.items()
        if ours.get(kind, {}).get(name) != member
    }
    assert not different, json.dumps(different, indent=1)
