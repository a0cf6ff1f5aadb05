"""Between processes gloo tells collectives apart by their order: it is the same on all of them, whichever is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.pod import results

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_a_gather_behind_a_loop_does_not_meet_one_of_the_loop(tmp_path: Path) -> None:
    for found in results("order", 2, 1, tmp_path, quickly=False):
        assert found == {"wrong": 0, "beside loops": [6, 0]}
