"""A run that loses a process and gets it back ends as one that was not disturbed, with every sample once an epoch."""

from __future__ import annotations

import collections
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.pod import SCRIPTS, environment
from xlatrain.cluster.elastic import launch_elastic
from xlatrain.cluster.launch import launch
from xlatrain.cluster.watch.goodput import goodput
from xlatrain.cluster.watch.ledger import read

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
STEPS, ROWS, EPOCHS = 36, 50, 4


def kept(folder: Path) -> dict[int, list[int]]:
    """Step → the samples, in order of their numbers, that the last world which took it had in it."""
    worlds: list[tuple[int, list[Path]]] = []
    for path in sorted(folder.glob("[0-9]*.jsonl"), key=lambda one: int(one.name.partition(".")[0])):
        size = int(path.name.split(".")[1])
        if not worlds or worlds[-1][0] != size or len(worlds[-1][1]) == size:
            worlds.append((size, []))
        worlds[-1][1].append(path)
    found: dict[int, list[int]] = {}
    for _, paths in worlds:
        of_world: dict[int, list[int]] = collections.defaultdict(list)
        for path in paths:
            for line in path.read_text().splitlines():
                step, rows = json.loads(line)
                of_world[step] += rows
        found |= {step: sorted(rows) for step, rows in of_world.items()}
    return found


def test_a_run_that_loses_a_process_and_gets_it_back_ends_as_one_that_was_not_disturbed(tmp_path: Path) -> None:
    folders = [tmp_path / "undisturbed", tmp_path / "disturbed"]
    for folder in folders:
        folder.mkdir()
    ledger, output = tmp_path / "ledger", io.StringIO()
    command = [sys.executable, str(SCRIPTS / "elastic.py")]
    assert launch([*command, str(folders[0])], 1, 3, environment=environment(), output=output) == 0, output.getvalue()
    status = launch_elastic(
        [*command, str(folders[1])], 1, 3, rejoin_after=0, may_rejoin=lambda _: (folders[1] / "may rejoin").exists(),
        memory_steps=1, environment=environment() | {"XLATRAIN_LEDGER": str(ledger)}, output=output,
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

    undisturbed, disturbed = (json.loads((folder / "result.json").read_text()) for folder in folders)
    assert undisturbed["steps"] == disturbed["steps"] == STEPS
    for name, value in undisturbed["weights"].items():
        np.testing.assert_allclose(disturbed["weights"][name], value, rtol=1e-4, atol=1e-6, err_msg=name)

    samples = kept(folders[1])
    for epoch in range(EPOCHS):
        of_epoch = [row for step in range(epoch * 9 + 1, epoch * 9 + 10) for row in samples[step]]
        assert sorted(of_epoch) == list(range(ROWS)), f"epoch {epoch}"
    assert kept(folders[0]) == {step: sorted(rows) for step, rows in samples.items()}

    found = goodput(read(ledger))
    assert found is not None and [loss.processes for loss in found.losses] == [(3, 2), (2, 3), (3, 2), (2, 1)]
    assert found.steps == STEPS and found.losses[1].lost_steps == 0  # it was asked to save
