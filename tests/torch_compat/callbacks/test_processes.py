"""Callbacks and loggers on two processes: one writes and shows, both agree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import warm

_ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_agree_and_one_writes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("process_script.py")
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = warm.run_pod([str(script), str(tmp_path)], 2, 2, env=environment, timeout=400)
    assert done.returncode == 0, done.stdout[-8000:]

    told = [json.loads((tmp_path / f"told-{process}.json").read_text()) for process in range(2)]
    assert told[0] == told[1]
    assert told[0]["steps"] == told[0]["timed"] == 4, "2 epochs of 8 batches on 4 devices; one checkpoint each"
    assert Path(told[0]["best"]).is_file()

    versions = sorted(path.name for path in (tmp_path / "lightning_logs").iterdir())
    assert versions == ["version_0", "version_1"], "one for each logger, not for each process"
    assert len(list(tmp_path.rglob("events.*"))) == 1
    steps = [line for line in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[1:] if line]
    assert len(steps) == len(set(steps)), "no row is there twice"
    assert (tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt").is_symlink()

    zero, _, one = done.stdout.partition("process 1:")
    assert "it/s" in zero and "compiling…" in zero
    assert "it/s" not in one, "bars are process 0's"
