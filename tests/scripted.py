"""Scripts that run once under Lightning and once under torch_compat, each in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests import stock_runs, warm

_ROOT = Path(__file__).parents[1]


def results_of(script: str | Path, package: str, *, timeout_s: float = 300) -> dict[str, Any]:
    """The JSON in the last line that ``script PACKAGE`` prints."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    is_stock = package.startswith("lightning")

    def run() -> dict[str, Any]:
        done = warm.run(warm.STOCK if is_stock else warm.OURS, [str(script), package], env=environment, timeout=timeout_s)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return stock_runs.kept_result(Path(script), [package], run) if is_stock else run()
