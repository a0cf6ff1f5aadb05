"""A handful of kills; ``make fire-drill`` does fifty."""

from __future__ import annotations

import signal
import time

import pytest

from tests.multiprocess.drill import World, drill, undisturbed
from torch_compat.trainer.preemption import EXIT_STATUS, NAME
from xlatrain import checkpoint

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_killed_runs_finish_with_the_weights_of_the_undisturbed_one(tmp_path):
    found = drill(tmp_path, kills=2, processes=2, devices=2, seed=7)
    assert found["kills"] == 2


def test_sigterm_to_one_process_saves_on_all(tmp_path):
    world = World(tmp_path, 2, 2)
    try:
        assert world.wait_for_steps(5)
        world.children[1].send_signal(signal.SIGTERM)
        statuses = [child.wait(timeout=120) for child in world.children]
        time.sleep(0.1)
        assert statuses == [EXIT_STATUS] * 2, "\n".join(world.output[-20:])
    finally:
        world.end()
    assert checkpoint.newest(tmp_path) == tmp_path / NAME
    assert checkpoint.verify(tmp_path / NAME).intact
    finished = undisturbed(tmp_path, 2, 2)
    assert finished == undisturbed(tmp_path / "straight", 2, 2)
