"""ModelCheckpoint, EarlyStopping, LearningRateMonitor do in scripted runs what Lightning's do: files, order, state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripted import results_of

pytestmark = pytest.mark.parity

_SCRIPT = Path(__file__).with_name("scripted_run.py")


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, Any], dict[str, Any]]:
    return results_of(_SCRIPT, "torch_compat"), results_of(_SCRIPT, "lightning.pytorch")


@pytest.mark.parametrize("group", ["checkpoints", "stoppings", "lr_monitors"])
def test_same_as_lightning(runs: tuple[dict[str, Any], dict[str, Any]], group: str) -> None:
    ours, lightnings = (run[group] for run in runs)
    assert lightnings, "the script ran nothing"
    different = {label: {"ours": ours[label], "lightning": run} for label, run in lightnings.items() if ours[label] != run}
    assert not different, json.dumps(different, indent=1)


def test_the_script_covers_saving_removing_and_linking(runs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Equal results say nothing if nothing happened."""
    checkpoints = runs[1]["checkpoints"]
    assert {event[0] for run in checkpoints.values() for event in run["events"]} == {"save", "remove", "logger told of"}
    assert any(is_link for is_link in checkpoints["link"]["tree (is link)"].values())
    reasons = {run["reason"] for run in runs[1]["stoppings"].values()}
    assert reasons == {"NOT_STOPPED", "STOPPING_THRESHOLD", "DIVERGENCE_THRESHOLD", "PATIENCE_EXHAUSTED", "NON_FINITE_METRIC"}
