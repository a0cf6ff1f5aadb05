"""A handful of kills; ``make fire-drill`` does fifty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.drill import Drill, drill

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_killed_and_preempted_runs_finish_with_the_weights_of_the_undisturbed_one(tmp_path: Path) -> None:
    kinds = [
        "SIGTERM while the sanity check hangs",
        "SIGKILL of one process",
        "SIGTERM while a loader hangs",
        "SIGTERM to JAX's preemption service",
    ]
    found = drill(tmp_path, kinds, processes=2, devices=2, so_far=Drill(seed=7))
    assert [end.how for end in found.ended] == kinds
    assert found.ended[-1].newest_step >= 1
