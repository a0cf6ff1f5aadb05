"""The loops do at each moment what stock's loops do: ``moments.py`` is run with both, and writes it down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scripted import results_of

SCRIPT = Path(__file__).parent / "moments.py"


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    return results_of(SCRIPT, "lightning.pytorch")


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return results_of(SCRIPT, "torch_compat")


@pytest.mark.parametrize("subject", ["streams", "limits", "stops", "counters", "gradients"])
def test_moments(subject: str, stock: dict[str, Any], ours: dict[str, Any]) -> None:
    assert set(ours[subject]) == set(stock[subject])
    for case, expected in stock[subject].items():
        assert ours[subject][case] == expected, case


def test_resuming_from_every_moment(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    """A resumed run takes the batches that the other one took after it had saved, with stock's hooks and counters.

    Stock's resumed run leaves out what came after the hook in which it saved (a validation that was due, an epoch's end); there
    ours does what a run without interruption does. Nor does it know the samples. A validation that had begun is not made again by
    either: epochs after it are shuffled otherwise than if it had drawn from the random streams.
    """
    assert set(ours["resumes"]) == set(stock["resumes"])
    for case, expected in stock["resumes"].items():
        found = ours["resumes"][case]
        assert (found is None) == (expected is None), case
        if expected is not None and not case.endswith("on_train_end 1"):
            assert found["rest"] == expected["rest"], case
            resumed, rest = _without_samples(found["resumed"]), _without_samples(expected["rest"])
            assert _batches(resumed) == _batches(rest), case
            if "on_validation_start" not in case:
                assert _batches(found["resumed"]) == _batches(expected["rest"]), case
            ways = (_without_samples(expected["resumed"]), *([*resumed[:1], *rest[start:]] for start in (0, 1)))
            assert resumed in ways, case


def _batches(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("batch")]


def _without_samples(said: list[str]) -> list[str]:
    return [line.partition(" of ")[0] for line in said]
