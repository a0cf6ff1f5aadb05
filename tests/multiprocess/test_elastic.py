"""A run that loses a process and gets it back ends as one that was not disturbed, with every sample once an epoch."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from tests.multiprocess.elastic_runs import SCRIPT, check, rejoining, undisturbed
from tests.multiprocess.pod import environment
from xlatrain.cluster.elastic import launch_elastic
from xlatrain.cluster.watch.goodput import goodput
from xlatrain.cluster.watch.ledger import read

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
STEPS, ROWS, EPOCHS = 36, 50, 4


def test_a_run_that_loses_a_process_and_gets_it_back_ends_as_one_that_was_not_disturbed(tmp_path: Path) -> None:
    folder, ledger, output = tmp_path / "disturbed", tmp_path / "ledger", io.StringIO()
    folder.mkdir()
    undisturbed(tmp_path / "undisturbed", 3, ROWS, EPOCHS)
    command = [sys.executable, str(SCRIPT), str(folder), str(ROWS), str(EPOCHS)]
    status = launch_elastic(
        command, 1, 3, rejoin_after=0, may_rejoin=lambda _: rejoining(folder), memory_steps=1,
        environment=environment() | {"XLATRAIN_LEDGER": str(ledger)}, output=output,
    )  # fmt: skip
    said = output.getvalue()
    assert status == 0, said
    assert "[launch] lost [1]; going on with 2 of 3 processes" in said
    assert "[launch] process(es) [1] may come back" in said
    continued = re.findall(
        r"continuing from \S*?([^/\s]+), (?:the newest checkpoint|which is in the hosts' memory, of step (\d+))", said
    )
    # A worker that is killed; the same step as was saved, when one comes back; a host that is lost; all memory that is lost.
    steps = [int(step) if step else name for name, step in dict.fromkeys(continued)]
    assert steps[0] == 4 and isinstance(steps[1], int) and steps[2:] == [13, "epoch=1-step=18.ckpt"], said

    check(folder, tmp_path / "undisturbed", ROWS, EPOCHS)

    found = goodput(read(ledger))
    assert found is not None and [loss.processes for loss in found.losses] == [(3, 2), (2, 3), (3, 2), (2, 1)]
    assert found.steps == STEPS and found.losses[1].lost_steps == 0  # it was asked to save
