"""A single device, without SPMD."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_compat.strategies import SingleDeviceXLAStrategy
from torch_compat.utilities.exceptions import MisconfigurationException

ROOT = Path(__file__).resolve().parents[2]


def test_training_on_one_device_is_plain_torch() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_USE_SPMD"}
    command = [sys.executable, "-m", "tests.torch_xla.single_device"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ours, expected = found["losses"]
    assert ours == pytest.approx(expected, abs=1e-6)
    assert found["difference"] < 1e-5
    assert found["predicted"] < 1e-5
    assert found["identity"]
    assert found["devices"] == ["cpu", "cpu"]
    assert not found["spmd"]
    assert "devices=3, but torch-xla has 4 here" in found["count"]
    assert "set CPU_NUM_DEVICES before the program starts" in found["count"]
    assert "PJRT_DEVICE=TPU" in found["platform"]
    assert "there are tensors on xla:0 already" in found["later"]


def test_another_device_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="TPU_VISIBLE_CHIPS"):
        SingleDeviceXLAStrategy(device=2)
