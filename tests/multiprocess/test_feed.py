"""Two processes × 4 devices feed the mesh exactly what one process × 8 devices does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.pod import results

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return results("feed", 1, 8, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return results("feed", 2, 4, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("name", ["sequential", "shuffled", "few", "with a leaf that is not split", "workers"])
def test_global_batches_are_those_of_one_process(name: str, alone: Any, together: list[Any]) -> None:
    assert together[0][name] == alone[name]
    assert together[1][name] == alone[name]
    assert sum(len(batch[0]) for batch in alone[name]) == (9 if name == "few" else 43)


def test_each_device_holds_the_rows_of_its_place_in_the_mesh(alone: Any, together: list[Any]) -> None:
    assert [rows for process in together for _, rows in process["rows on the devices"]] == [
        rows for _, rows in alone["rows on the devices"]
    ]


def test_streams_are_put_side_by_side(together: list[Any]) -> None:
    assert together[0]["streams"] == together[1]["streams"] == [[[0, 1, 2, 3, 100, 101, 102, 103]], [[4, 5, 104, 105]]]


def test_unequal_numbers_of_batches_are_an_error_on_every_process(together: list[Any]) -> None:
    for result in together:
        assert "ended after 3 batches on processes [0]" in result["lengths"]


def test_shapes_that_do_not_fit_are_named_on_every_process(together: list[Any]) -> None:
    for result in together:
        assert "float32[4, 2] on process 0 (batch size 4) and float32[4, 3] on process 1" in result["shapes"]
        assert "1 tensors on process 0 and 2 on process 1" in result["leaves"]
        assert "batch leaf 1 of shape [] is not split by rows" in result["values"]


def test_processes_that_hold_the_same_part_must_bring_the_same_rows(together: list[Any]) -> None:
    for result in together:
        assert result["both"] == [[[0, 1, 2, 3], [0, 1, 2, 3]], 6]
        assert "batch leaf 0 has other values on process 0 than on process 1, but these hold the same part" in result["twins"]
