"""Layers as loops, and a mesh of 2 × 2 × 2, on two processes × 4 devices: the run of one process with unrolled layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.deep import fit
from tests.multiprocess.pod import results
from tests.torch_compat.strategies.small import drawing_in_programs

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_stacks_over_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", "off")
    with drawing_in_programs():
        expected = fit("auto", 1, folder=tmp_path)
    assert not expected["loops"] and abs(expected["losses"][-1] - expected["losses"][0]) > 1e-3  # it moved
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", "3")
    for process, one in enumerate(results("layers", 2, 4, tmp_path / "together")):
        assert process or (one["loops"] and not any("unrolled" in text for text in one["loops"])), one["loops"]
        np.testing.assert_allclose(one["losses"], expected["losses"], rtol=2e-5)
        np.testing.assert_allclose(one["together"], expected["together"], atol=2e-5)
        np.testing.assert_allclose(one["alone"], [] if process else expected["alone"], atol=2e-5)
        for name, values in expected["weights"].items():
            np.testing.assert_allclose(one["weights"][name], values, atol=5e-5, err_msg=name)
