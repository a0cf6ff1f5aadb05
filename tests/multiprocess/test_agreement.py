"""Processes that are about to do different things say so at once, on all of them, instead of hanging."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiprocess import pod

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_the_odd_process_is_named(tmp_path: Path) -> None:
    whats = ["epochs", "layer", "rate", "variable", "checkpoint", "same"]
    done = pod.run([str(pod.SCRIPTS / "odd_one.py"), str(tmp_path), ",".join(whats)], 3, 1)
    assert done.returncode == 0, done.stdout
    said = {what: re.findall(rf"\[(\d)\] {what}: (.*)", done.stdout) for what in whats}
    assert all(sorted(process for process, _ in lines) == ["0", "1", "2"] for lines in said.values()), done.stdout
    expected = {
        "epochs": "processes disagree about the run: Trainer.max_epochs is 3 on process 1, 1 elsewhere",
        "layer": r"layer.weight is float32\[3, 4\] on process 1, float32\[2, 4\] elsewhere; layer.bias",
        "rate": "hparams.rate is 0.5 on process 1, 0.1 elsewhere",
        "variable": "the variable XLATRAIN_ROLL_LAYERS is 17 on process 1, unset elsewhere",
        "checkpoint": "the checkpoint to restore: the path is .*elsewhere.ckpt on process 1, .*a.ckpt elsewhere",
        "same": "nothing",
    }
    for what, pattern in expected.items():
        for _, line in said[what]:
            assert re.search(pattern, line), line
