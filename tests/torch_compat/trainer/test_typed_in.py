"""Several runs in one process whose code was typed in, as in a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    code = (Path(__file__).parent / "typed_in.py").read_text()
    done = subprocess.run([sys.executable, "-"], input=code, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RECORD "))
    return json.loads(line.removeprefix("RECORD "))


def test_validation_prediction_and_inference_agree_after_fit(record: dict[str, Any]) -> None:
    assert record["validated"] < record["before"]
    assert record["predicted"] == pytest.approx(record["validated"])
    assert record["inference"] == pytest.approx(record["validated"])
    assert record["kinds"] == ["Parameter", "Parameter"]


def test_a_second_fit_goes_on(record: dict[str, Any]) -> None:
    assert record["on"] == [3, 6]  # two batches of 8 on 8 devices an epoch


def test_state_in_an_object_of_the_users_own_class_is_kept(record: dict[str, Any]) -> None:
    assert len(record["outputs"]) == 6
    assert record["tally"] == record["outputs"]
    assert record["doubled"] == pytest.approx([2 * loss for loss in record["outputs"]])


def test_an_interrupt_ends_the_run_and_leaves_the_module_usable(record: dict[str, Any]) -> None:
    assert record["exit"] == 1
    assert record["interrupted"] == ["KeyboardInterrupt", True, 5, "Parameter"]
    assert record["again"] == [True, 2, 8]
