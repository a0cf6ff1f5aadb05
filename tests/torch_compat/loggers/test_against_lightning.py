"""Loggers write the files that Lightning's write; callbacks and loggers have Lightning's public names and signatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import results_of

pytestmark = pytest.mark.parity

_SCRIPT = Path(__file__).with_name("scripted_logging.py")


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, Any], dict[str, Any]]:
    return results_of(_SCRIPT, "torch_compat"), results_of(_SCRIPT, "lightning.pytorch")


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
