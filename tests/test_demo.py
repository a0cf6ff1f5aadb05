"""The demo, with a smaller model and fewer steps: started, stopped by a signal, resumed, drawn and checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compiling

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--steps", "300", "--val-every", "50", "--width", "64", "--layers", "1", "--length", "64", "--lr", "5e-3"]


@pytest.mark.slow
def test_demo_stops_resumes_and_learns(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    flags = ["--output", str(output), "--stop-after", "50", "--stop-delay", "0", *SMALL]
    environment = compiling.environment(quickly=False)
    in_background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]  # as a script starts it: SIGINT is ignored
    done = subprocess.run(
        [*in_background, sys.executable, "examples/demo.py", *flags],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 300
    assert summary["val_loss"] < 0.9 * summary["unigram_entropy"]
    assert "stopped it with SIGINT (exit code 1)" in done.stdout
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    stopped = json.loads((output / "report_1_stopped.json").read_text())["runs"][0]
    resumed = json.loads((output / "report_2_resumed.json").read_text())["runs"][0]
    assert stopped["steps"] < 300
    assert resumed["steps"] < 300
    assert stopped["mesh"] == resumed["mesh"] == {"data": 2, "fsdp": 4}
