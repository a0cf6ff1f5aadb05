"""What is done to the bars of runs, in order, beside Lightning: made, emptied, moved, described, closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scripted import results_of

pytestmark = pytest.mark.parity

_SCRIPT = Path(__file__).with_name("bars_script.py")


def _of_any_executor(events: list[Any]) -> list[Any]:
    """Without repeated drawings of one state: a bar that said that a step is compiled, or made way for a line, is drawn again."""
    found: list[Any] = []
    for event in events:
        if event[1] != "refresh" or event not in found[-3:]:
            found.append(event)
    return found


def test_same_as_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    ours, stock = (results_of(_SCRIPT, package) for package in ("torch_compat", "lightning.pytorch"))
    assert len(stock) == 13 and all(stock.values())
    for label, events in stock.items():
        assert _of_any_executor(ours[label]) == _of_any_executor(events), label
