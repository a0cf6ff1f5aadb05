"""Silent data corruption on one of two processes is named by both, and not saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiprocess import pod

pytestmark = pytest.mark.multiprocess


def test_the_process_and_host_of_a_flipped_bit_are_named_by_all(tmp_path: Path) -> None:
    for found in pod.results("corrupted", 2, 2, tmp_path):
        said = r"at step 4: cpu:2048 \(process 1, host \S+\) holds other bits of params.layer.weight than the 3 replica"
        assert re.search(said, found["said"]), found["said"]
        assert found["saved"] == ["epoch=0-step=2.ckpt"]
