"""Mistakes of users: stock's exception with stock's clause, in twenty lines that show the user's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scripted import results_of

_SCRIPT = Path(__file__).parent / "mistakes.py"
_NO_LINE = {"loss_of_many", "loss_detached", "loss_without_key"}
"""Mistakes in what a step returns: no line of it raised."""
_SAID_SHORTER = {"log_of_many"}
"""Stock prints the tensor."""


@pytest.fixture(scope="module")
def raised() -> dict[str, dict[str, Any]]:
    return {package: results_of(_SCRIPT, package) for package in ("lightning.pytorch", "torch_compat")}


def test_each_is_stocks_exception_in_a_few_lines(raised: dict[str, dict[str, Any]]) -> None:
    wrong = []
    stock, ours = raised["lightning.pytorch"], raised["torch_compat"]
    assert len(ours) >= 25
    for name, expected in stock.items():
        got = ours[name]
        lines = got["traceback"]
        clause = expected["message"].splitlines()[0]
        limit = 25 if name == "deep_in_calls" else 20  # five frames of the user's own
        if expected["type"] not in got["classes"]:
            wrong.append(f"{name}: {got['type']}, stock {expected['type']}")
        if name not in _SAID_SHORTER and not _begins_with(got["message"], clause):
            wrong.append(f"{name}: {got['message']!r}, stock {clause!r}")
        if len(lines) > limit or any("During handling" in line for line in lines):
            wrong.append(f"{name}: {len(lines)} lines")
        places = [place for n in got["at"] for place in (f"mistakes.py:{n}:", f'mistakes.py", line {n},')]
        if name not in _NO_LINE and not any(place in line for line in lines for place in places):
            wrong.append(f"{name}: its line is not named")
    assert not wrong, "\n".join(wrong)


def test_the_users_own_chain_stays(raised: dict[str, dict[str, Any]]) -> None:
    text = "\n".join(raised["torch_compat"]["own_chain"]["traceback"])
    assert "KeyError: 'labels'" in text
    assert "direct cause" in text


def _begins_with(message: str, clause: str) -> bool:
    """Whether a message begins with stock's clause; of sizes and dtypes the order may be another."""
    return message.startswith(clause.rstrip(".")) or sorted(message.split(";")[0].split()) == sorted(clause.split())
