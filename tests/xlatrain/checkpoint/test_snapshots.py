"""A snapshot in keepers' memory is read onto any mesh, while one keeper of each part lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.checkpoint import CheckpointMismatchError, CheckpointNotFoundError, CorruptCheckpointError
from xlatrain.checkpoint.snapshots import Snapshots, is_snapshot, newest_snapshot, open_snapshot
from xlatrain.cluster.keepers import VARIABLE, KeeperConnection, Keepers, NeighbourMemory
from xlatrain.cluster.launch import SECRET

VALUES = {
    "w": np.arange(64, dtype=np.float32).reshape(16, 4),
    "half": np.arange(8).astype(jnp.bfloat16),
    "step": np.array(7, np.int32),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[NeighbourMemory]:
    with Keepers(2, 4, "known") as keepers:
        keepers.begin_world([0, 1])
        monkeypatch.setenv(VARIABLE, keepers.variables(0)[VARIABLE])
        monkeypatch.setenv(SECRET, "known")
        told = NeighbourMemory.of_environment()
        assert told is not None
        yield told


def sharding(*axes: str | None, shape: tuple[int, int] = (2, 4)) -> NamedSharding:
    return NamedSharding(jax.make_mesh(shape, ("a", "b")), PartitionSpec(*axes))


def placed() -> dict[str, jax.Array]:
    specs = {"w": ("a", "b"), "half": (("a", "b"),), "step": (), "empty": (None, "b")}
    return {name: jax.device_put(value, sharding(*specs[name])) for name, value in VALUES.items()}  # pyright: ignore[reportArgumentType]


def take(snapshots: Snapshots, step: int, files: dict[str, bytes] | None = None) -> None:
    snapshots.take(placed(), lambda: files or {"host.pt": b"host state"}, step)
    snapshots.wait()
    assert not snapshots.failure


def kill(address: str) -> None:
    with KeeperConnection(address) as keeper:
        os.kill(keeper.parts()[1], signal.SIGKILL)


def test_a_snapshot_is_read_as_it_was_onto_another_mesh(memory: NeighbourMemory) -> None:
    snapshots = Snapshots(memory, fit=1)
    take(snapshots, 3)
    found = newest_snapshot(memory, 1)
    assert found is not None and found[1] == 3 and is_snapshot(found[0])
    opened = open_snapshot(found[0])
    assert dict(opened.files) == {"host.pt": b"host state"} and opened.facts == {"step": 3}
    for name, value in opened.restore_numpy().items():
        np.testing.assert_array_equal(value, VALUES[name])
        assert value.dtype == VALUES[name].dtype
    elsewhere = {
        "w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding("b", shape=(4, 2))),
        "half": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding()),
    }
    restored = opened.restore(elsewhere, subset=True, cast=True)
    for name, value in restored.items():
        np.testing.assert_array_equal(value, VALUES[name].astype(value.dtype))
        assert value.sharding == elsewhere[name].sharding
    with pytest.raises(CheckpointMismatchError, match=r"neighbour-memory.*not in the checkpoint: other"):
        opened.restore({"other": elsewhere["w"]}, subset=True)


def test_values_are_those_of_the_moment_it_was_taken(memory: NeighbourMemory) -> None:
    arrays = placed()
    snapshots = Snapshots(memory, fit=1)
    snapshots.take(arrays, dict, 1)
    jax.jit(lambda w: w * 0, donate_argnums=0)(arrays["w"]).block_until_ready()
    snapshots.wait()
    name, _ = newest_snapshot(memory, 1) or ("", 0)
    np.testing.assert_array_equal(open_snapshot(name).restore_numpy(["w"])["w"], VALUES["w"])


def test_the_newest_of_a_run_is_kept_and_those_before_it_are_not(memory: NeighbourMemory) -> None:
    first = Snapshots(memory, fit=1)
    take(first, 3)
    take(first, 5)
    assert first.taken == 2 and first.part_bytes == first.held_bytes == 64 * 4 + 8 * 2 + 4 + len(b"host state")
    assert (newest_snapshot(memory, 1) or ("", 0))[1] == 5
    assert newest_snapshot(memory, 2) is None
    take(Snapshots(memory, fit=2), 1)
    assert newest_snapshot(memory, 1) is None and (newest_snapshot(memory, 2) or ("", 0))[1] == 1


def test_while_parts_are_missing_the_one_before_is_the_newest(memory: NeighbourMemory) -> None:
    take(Snapshots(memory, fit=1), 3)
    for address in memory.keepers:
        with KeeperConnection(address) as keeper:
            ((_, _, header),) = keeper.parts()[0]
            keeper.put((memory.world + 1, 1), 1, {**header, "step": 9, "parts": 2}, [])
    assert (newest_snapshot(memory, 1) or ("", 0))[1] == 3
    with pytest.raises(CheckpointNotFoundError, match=r"its parts of processes \[0\] are in no keeper's memory any more"):
        open_snapshot(f"neighbour-memory:{memory.world + 1}.1")


def test_one_keeper_is_enough_and_none_is_said(memory: NeighbourMemory) -> None:
    snapshots = Snapshots(memory, fit=1)
    take(snapshots, 3)
    name, _ = newest_snapshot(memory, 1) or ("", 0)
    opened = open_snapshot(name)
    kill(memory.keepers[0])
    np.testing.assert_array_equal(opened.restore_numpy(["w"])["w"], VALUES["w"])
    snapshots.take(placed(), dict, 4)
    snapshots.wait()
    assert snapshots.failure.startswith(f"it is in one place only: the keeper at {memory.keepers[0]} does not answer")
    kill(memory.keepers[1])
    with pytest.raises(CorruptCheckpointError, match=r"the part of process 0 cannot be read: the keeper at .*; the keeper at"):
        opened.restore_numpy(["w"])
    assert newest_snapshot(memory, 1) is None
    snapshots.take(placed(), dict, 5)
    snapshots.wait()
    assert memory.keepers[0] in snapshots.failure and memory.keepers[1] in snapshots.failure


def test_other_bytes_than_were_given_are_not_believed(memory: NeighbourMemory) -> None:
    take(Snapshots(memory, fit=1), 3)
    name, _ = newest_snapshot(memory, 1) or ("", 0)
    opened = open_snapshot(name)
    for address in memory.keepers:
        with KeeperConnection(address) as keeper:
            ((snapshot, part, header),) = keeper.parts()[0]
            sizes = [len(keeper.get(snapshot, part, blob)) for blob in range(len(header["digests"]))]
            keeper.put(snapshot, part, header, [b"." * size for size in sizes])
    with pytest.raises(CorruptCheckpointError, match="has other bytes than it was given"):
        opened.restore_numpy(["w"])
