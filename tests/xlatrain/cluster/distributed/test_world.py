"""A single process: a world without a coordinator, and collectives that cost nothing."""

from __future__ import annotations

import pytest

from xlatrain.cluster import distributed
from xlatrain.mesh.lockstep import lockstep


def test_alone() -> None:
    world = distributed.initialize()
    assert (world.process_id, world.process_count, world.is_main) == (0, 1, True)
    assert world.coordinator_address is None
    assert distributed.world() == distributed.initialize()
    assert distributed.initialize(num_processes=1, process_id=0).process_count == 1


def test_collectives_of_one_process() -> None:
    value = object()
    assert distributed.broadcast_object(value) is value
    assert distributed.all_gather_object(value) == [value]
    assert distributed.any_process(True)
    assert not distributed.all_processes(False)
    distributed.barrier("here")


def test_lockstep_of_one_process_draws_nothing_ahead() -> None:
    batches = iter([1, 2, 3])
    walk = lockstep(batches)
    assert next(walk) == 1
    assert next(batches) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator_address": "h:1"}, r"given \['coordinator_address'\] without \['num_processes', 'process_id'\]"),
        ({"num_processes": 2, "process_id": 0}, r"without \['coordinator_address'\]"),
        ({"coordinator_address": "h:1", "num_processes": 2, "process_id": 2}, "between 0 and num_processes - 1 = 1, not 2"),
        ({"coordinator_address": "host", "num_processes": 2, "process_id": 0}, "must be host:port, not 'host'"),
    ],
)
def test_incomplete_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distributed.initialize(**arguments)  # pyright: ignore[reportArgumentType]
