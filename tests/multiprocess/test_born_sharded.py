"""A module born on two processes × 4 devices is the one born on one process, and is never whole on any of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.pod import results

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_values_training_and_checkpoints_are_those_of_one_process(tmp_path: Path) -> None:
    (alone,) = results("born_sharded", 1, 8, tmp_path / "alone", str(tmp_path / "one.ckpt"))
    together = results("born_sharded", 2, 4, tmp_path / "together", str(tmp_path / "two.ckpt"))
    assert together[0]["losses"] == together[1]["losses"]
    for process in together:
        np.testing.assert_allclose(process["losses"] + process["continued"], alone["losses"], rtol=2e-5)
        assert process["kept"]  # on the mesh: it did not fit the host
        assert "net.1.weight is float32[641, 640] on process 1, float32[640, 640] elsewhere" in process["error"]
    assert together[0]["sum"] == together[1]["sum"]
