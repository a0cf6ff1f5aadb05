"""``examples/llama.py``: born on eight shards, trained, and saved.

Its digests of many sharded arrays at once were a deadlock of XLA:CPU.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests import warm
from xlatrain.checkpoint import is_checkpoint

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama.py"


@pytest.mark.slow
def test_trains_and_saves(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    environment = {**os.environ, "XLATRAIN_REPORT": str(report), "XLATRAIN_EXECUTOR": "compiled"}
    done = warm.run(warm.OURS, ["-m", "torch_compat", str(EXAMPLE)], env=environment, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"4 steps, loss 6\.\d+", done.stdout.splitlines()[-1])
    (run,) = json.loads(report.read_text())["runs"]
    assert (run["executor"], run["mesh"]) == ("compiled", {"data": 1, "fsdp": 8})
    (saved,) = (tmp_path / "lightning_logs").glob("version_0/checkpoints/*.ckpt")
    assert is_checkpoint(saved)
