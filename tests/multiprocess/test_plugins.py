"""Plugins of every era on two processes of four devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess.pod import results
from tests.torch_compat.strategies.small import trained, weights

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return results("plugins", 2, 4, Path(tmp_path_factory.mktemp("plugins")))


def test_collectives_mean_what_they_say(both: list[Any]) -> None:
    for one in both:
        assert one["gather"] == [[[1, 2], [2, 4]], [[2, 3], [3, 5]], "text"]
        assert one["reduce"] == [[1.5, 3], [1.5, 3], [3, 6], [1, 2], [2, 4], [1.5, 3]]
        assert one["reduce op of torch"] == [3, 6] and one["reduce of integers"] == [0.5, 4.0]
        assert one["reduce of no tensor"] == "text" and one["broadcast"] == [2, 4]
        assert one["decisions"] == [False, True]


def test_a_gather_with_sync_grads_differentiates(both: list[Any]) -> None:
    # d/dx of the sum over both processes' losses: process p weighs row r by (p + 1) * 10 ** r
    assert [one["gradient"] for one in both] == [[3, 3], [30, 30]]
    assert not both[0]["no gradient"]


def test_wrong_collectives_are_named(both: list[Any]) -> None:
    for one in both:
        assert "float32[1] on process 0, float32[2] on process 1" in one["shapes"]
        assert "src is a process, between 0 and 1" in one["source"]
        assert "reduce(group=<object" in one["group"]
        assert (
            "Disagrees.update_global_step must return the same number on every process, but it returned [1, 2]"
            in one["global step"]
        )
    assert "TimeoutError" in both[0]["alone"] and "'only process 0'" in both[0]["alone"] and "process 1" in both[0]["alone"]


def test_training_with_plugins_equals_one_process(both: list[Any]) -> None:
    expected = weights(trained())
    for one in both:
        for name in ("plain", "parameter server", "in a step"):
            torch.testing.assert_close(torch.tensor(one[name]), expected, msg=name)
        assert one["rows"] == [8, 8]
        assert one["first weights"] == both[0]["first weights"]


def test_one_process_ends_the_epoch_of_all(both: list[Any]) -> None:
    assert [one["skips"] for one in both] == [[2, 1, 1]] * 2


def test_a_metric_counts_all_processes_where_a_hook_imports_torchmetrics(both: list[Any]) -> None:
    assert [one["late metric"] for one in both] == [[False, 3.0]] * 2


def test_data_is_prepared_once_on_a_host(both: list[Any]) -> None:
    assert [one["prepared"] for one in both] == [True, False]


def test_custom_collectives_of_a_plugin_of_1_4(both: list[Any]) -> None:
    assert [one["custom collectives"] for one in both] == [[["barrier", "broadcast", "reduce"], 2.0]] * 2


def test_one_stock_file_from_shards_on_both_processes(both: list[Any]) -> None:
    assert [one["stock file"] for one in both] == [[True, True]] * 2
