"""Elastic runs of ``scripts/elastic.py``: what they have trained on, and whether they ended as one that was not disturbed."""

from __future__ import annotations

import collections
import io
import json
import sys
from pathlib import Path

import numpy as np

from tests.multiprocess.pod import SCRIPTS, environment
from xlatrain.cluster.launch import launch

SCRIPT = SCRIPTS / "elastic.py"


def undisturbed(folder: Path, devices: int, rows: int, epochs: int) -> None:
    """Run it as one process with so many devices."""
    folder.mkdir()
    command, output = [sys.executable, str(SCRIPT), str(folder), str(rows), str(epochs)], io.StringIO()
    assert launch(command, 1, devices, environment=environment(), output=output) == 0, output.getvalue()


def rejoining(folder: Path) -> bool:
    """Whether the newest world has said that those that are lost may come back."""
    worlds = [int(path.name.split(".")[0]) for path in folder.glob("[0-9]*.jsonl")]
    return bool(worlds) and (folder / f"may rejoin.{max(worlds)}").exists()


def check(folder: Path, expected: Path, rows: int, epochs: int) -> None:
    """Compare the weights with those of the undisturbed run, and look for every sample once in each epoch."""
    one, other = (json.loads((path / "result.json").read_text()) for path in (folder, expected))
    assert one["steps"] == other["steps"]
    for name, value in other["weights"].items():
        np.testing.assert_allclose(one["weights"][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    samples, steps = _kept(folder), other["steps"] // epochs
    for epoch in range(epochs):
        of_epoch = [row for step in range(epoch * steps + 1, (epoch + 1) * steps + 1) for row in samples[step]]
        assert sorted(of_epoch) == list(range(rows)), f"epoch {epoch}"
    assert _kept(expected) == samples


def _kept(folder: Path) -> dict[int, list[int]]:
    """Step → the samples, in order of their numbers, that the last world which took it had in it."""
    worlds: dict[int, dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in folder.glob("[0-9]*.jsonl"):
        for line in path.read_text().splitlines():
            step, rows = json.loads(line)
            worlds[int(path.name.split(".")[0])][step] += rows
    return {step: sorted(rows) for _, of_world in sorted(worlds.items()) for step, rows in of_world.items()}
