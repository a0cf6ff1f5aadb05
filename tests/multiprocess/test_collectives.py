"""Collectives of host objects between real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.pod import results

pytestmark = pytest.mark.multiprocess
N = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return results("collectives", N, 1, tmp_path_factory.mktemp("collectives"))


def test_world(found: list[Any]) -> None:
    assert [result["world"] for result in found] == [[p, N, p, p, N] for p in range(N)]
    assert all(result["again"] for result in found)


def test_values_arrive_everywhere(found: list[Any]) -> None:
    sent = [{"from": p} for p in range(N)]
    for result in found:
        assert result["broadcast"] == sent
        assert result["gather"] == sent
        assert result["many"]
        assert result["large"] == [3_000_000 + p for p in range(N)]
        assert result["any"] == [True, False]
        assert result["all"] == [False, True]


def test_who_did_not_come_is_named(found: list[Any]) -> None:
    assert found[0]["barrier"].startswith("TimeoutError: process 0 waited at 'saving' for processes 1, 2, which did not come")
    assert found[1]["broadcast alone"].startswith("TimeoutError: process 1 waited at 'lonely' for process 0, which did not come")


def test_wrong_calls_are_refused(found: list[Any]) -> None:
    for result in found:
        assert result["source"] == "ValueError: src must be a process between 0 and 2, not 7"
        assert "it cannot become process 4 of 5" in result["another world"]
