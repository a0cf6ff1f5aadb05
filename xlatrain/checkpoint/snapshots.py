"""Snapshots of a run's state in the memory of its hosts, from which a run goes on without reading storage.

A snapshot is what a checkpoint directory holds, in parts: the shards that each process has the first copy of, and with process
0's the host state. Each part goes to the keeper of the process's own host and to that of its neighbour
(:mod:`xlatrain.cluster.keepers`), in the background. Those before it are forgotten when all processes have given all of theirs:
at any moment one whole snapshot is kept, in two places.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.checkpoint.agreement import Rendezvous
from xlatrain.checkpoint.arrays import check_storable
from xlatrain.checkpoint.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from xlatrain.checkpoint.manifest import ArrayMetadata
from xlatrain.checkpoint.reading import Checkpoint
from xlatrain.cluster.keeper import Snapshot
from xlatrain.cluster.keepers import KeeperConnection, KeeperError, NeighbourMemory

SCHEME = "neighbour-memory:"
"""How the name of a snapshot begins, where a path is expected."""

Bounds = tuple[tuple[int, int], ...]
_numbers = itertools.count(1)  # of all runs of this process, and the same on every process


class Snapshots:
    """The snapshots that a run takes, one after the other.

    Attributes:
        taken: how many were begun.
        part_bytes: of this process's part of the last one.
        held_bytes: that this host's keeper had when it was complete.
        waited_s: how long the run has waited for copies off the devices and for earlier snapshots.
        failure: why the last one is not complete, until somebody has asked.

    Args:
        memory: what the launcher said.
        fit: the number of the run in its process.
    """

    def __init__(self, memory: NeighbourMemory, fit: int) -> None:
        self.taken = self.part_bytes = self.held_bytes = 0
        self.waited_s = 0.0
        self.failure = ""
        self._memory = memory
        self._fit = fit
        self._thread: threading.Thread | None = None
        self._rendezvous: Rendezvous | None = None

    def take(self, arrays: Mapping[str, jax.Array], files: Callable[[], Mapping[str, bytes]], step: int) -> None:
        """Copy the state off the devices and give it to the keepers in the background; collective.

        The one before is waited for.

        Args:
            arrays: name → global array.
            files: gives the host state; called on process 0.
            step: at which it is.

        Raises:
            ValueError: an array was deleted, or lives on one of several processes only.
        """
        self.wait()
        began = time.monotonic()
        rendezvous = Rendezvous()
        snapshot = (self._memory.world, next(_numbers))
        try:
            check_storable(arrays)
            host = dict(files()) if jax.process_index() == 0 else {}
            pieces = list(_pieces(arrays))
        except BaseException as error:
            rendezvous.fail(f"{type(error).__name__}: {error}")
            raise
        header = {
            "fit": self._fit,
            "step": step,
            "parts": jax.process_count(),
            "arrays": {name: (array.shape, array.dtype.name) for name, array in arrays.items()},
            "pieces": [(name, bounds) for name, bounds, _ in pieces],
            "files": list(host),
        }
        blobs = [*(_bytes_of(values) for _, _, values in pieces), *map(memoryview, host.values())]
        self.taken += 1
        self.part_bytes = sum(map(len, blobs))
        arguments = (snapshot, header, blobs, rendezvous)
        # A daemon: where other processes are gone it would wait for them, and they have the run ended.
        self._thread = threading.Thread(target=self._keep, args=arguments, name="xlatrain-snapshot", daemon=True)
        self._thread.start()
        self.waited_s += time.monotonic() - began

    def wait(self) -> None:
        """Return when the last one is complete, or has failed on every process."""
        began = time.monotonic()
        if self._thread is not None:
            self._thread.join()
        self.waited_s += time.monotonic() - began

    def _keep(self, snapshot: Snapshot, header: dict[str, Any], blobs: Sequence[memoryview], rendezvous: Rendezvous) -> None:
        part, refused, kept = jax.process_index(), [], 0
        digests = [hashlib.sha256(blob).hexdigest() for blob in blobs]
        try:
            for address in self._memory.keepers[:2]:
                try:
                    with KeeperConnection(address) as connection:
                        connection.put(snapshot, part, {**header, "digests": digests}, blobs)
                    kept += 1
                except KeeperError as error:
                    refused.append(str(error))
            if not kept:
                raise KeeperError("; ".join(refused))
            rendezvous.meet()
            if self._rendezvous is not None:
                self._rendezvous.close()  # whoever meets here has waited for the one before
            self._rendezvous = rendezvous
            self.failure = f"it is in one place only: {refused[0]}" if refused else ""
        except BaseException as error:  # in a thread: it is told where the next one is taken
            self.failure = str(error)
            rendezvous.fail(f"{type(error).__name__}: {error}")
            if isinstance(error, (CheckpointError, KeeperError)):  # where others are gone it may be complete
                self._take_back(snapshot)
            return
        self._forget_before(snapshot)

    def _take_back(self, snapshot: Snapshot) -> None:
        """Some process could not give its part; the next snapshot needs the place of this one."""
        for address in self._memory.keepers[:2]:
            with contextlib.suppress(KeeperError), KeeperConnection(address) as connection:
                connection.take_back(snapshot)

    def _forget_before(self, snapshot: Snapshot) -> None:
        """All processes have given their parts. Process 0 tells those keepers, too, whose processes are gone."""
        for number, address in enumerate(self._memory.keepers if jax.process_index() == 0 else self._memory.keepers[:2]):
            with contextlib.suppress(KeeperError), KeeperConnection(address) as connection:
                held = connection.forget(snapshot)
                self.held_bytes = held if number == 0 else self.held_bytes


def newest_snapshot(memory: NeighbourMemory, fit: int) -> tuple[str, int] | None:
    """The name and the step of the newest snapshot of a run of which all parts are kept; local to this process."""
    complete = {
        snapshot: parts
        for snapshot, parts in _kept(memory).items()
        if (header := next(iter(parts.values()))[0])["fit"] == fit and parts.keys() == set(range(header["parts"]))
    }
    if not complete:
        return None
    newest = max(complete)
    return f"{SCHEME}{newest[0]}.{newest[1]}", complete[newest][0][0]["step"]


def open_snapshot(name: str) -> Checkpoint:
    """Open a snapshot that :func:`newest_snapshot` has named; on any process, and onto any mesh.

    Raises:
        CheckpointNotFoundError: a part of it is not there any more.
    """
    memory = NeighbourMemory.of_environment()
    world, _, number = name.removeprefix(SCHEME).partition(".")
    parts = {} if memory is None else _kept(memory).get((int(world), int(number)), {})
    missing = sorted(set(range(parts[min(parts)][0]["parts"])) - parts.keys()) if parts else []
    if not parts or missing:
        what = f"its parts of processes {missing} are" if missing else "it is"
        raise CheckpointNotFoundError(
            f"{name}: {what} in no keeper's memory any more; start the run again: it continues from storage"
        )
    return _SnapshotInMemory(name, (int(world), int(number)), parts)


Parts = dict[int, tuple[dict[str, Any], list[str]]]
"""Number of a part → its header, and the addresses of the keepers that have it."""


def _kept(memory: NeighbourMemory) -> dict[Snapshot, Parts]:
    """All snapshots of which some part is kept; keepers that do not answer keep nothing."""
    found: dict[Snapshot, Parts] = {}
    for address in memory.keepers:
        with contextlib.suppress(KeeperError), KeeperConnection(address) as connection:
            for snapshot, part, header in connection.parts()[0]:
                found.setdefault(snapshot, {}).setdefault(part, (header, []))[1].append(address)
    return found


class _SnapshotInMemory(Checkpoint):
    """A checkpoint whose arrays and files are parts that keepers have. What is read is compared with its SHA-256."""

    def __init__(self, name: str, snapshot: Snapshot, parts: Parts) -> None:
        self.path = name  # pyright: ignore[reportAttributeAccessIssue]
        first = parts[0][0]
        self.committed_ns = 0
        self.facts = {"step": first["step"]}
        self.versions = {}
        self._snapshot = snapshot
        self._parts = parts
        self._metadata = {name: ArrayMetadata(tuple(shape), dtype) for name, (shape, dtype) in first["arrays"].items()}
        self._pieces: dict[str, list[tuple[Bounds, int, int]]] = {name: [] for name in self._metadata}
        for part, (header, _) in parts.items():
            for blob, (name, bounds) in enumerate(header["pieces"]):
                self._pieces[name].append((tuple((start, stop) for start, stop in bounds), part, blob))
        self.files = _Files(self, {name: len(first["pieces"]) + number for number, name in enumerate(first["files"])})

    def blob(self, part: int, number: int) -> bytearray:
        """A blob of a part, from the first keeper that gives what was put.

        Raises:
            CorruptCheckpointError: none does.
        """
        header, addresses = self._parts[part]
        problems = []
        for address in addresses:
            try:
                with KeeperConnection(address) as connection:
                    data = connection.get(self._snapshot, part, number)
            except KeeperError as error:
                problems.append(str(error))
                continue
            if hashlib.sha256(data).hexdigest() == header["digests"][number]:
                return data
            problems.append(f"the keeper at {address} has other bytes than it was given")
        raise CorruptCheckpointError(f"{self.path}: the part of process {part} cannot be read: {'; '.join(problems)}")

    def _read_sharded(self, template: Mapping[str, Any]) -> dict[str, jax.Array]:
        return {name: self._placed(name, leaf) for name, leaf in template.items()}

    def _placed(self, name: str, leaf: Any) -> jax.Array:
        shape, regions = tuple(leaf.shape), {}

        def region(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            bounds = _bounds(index, shape)
            if bounds not in regions:  # devices that hold the same
                regions[bounds] = self._region(name, bounds).astype(leaf.dtype, copy=False)
            return regions[bounds]

        return jax.make_array_from_callback(shape, leaf.sharding, region)

    def _read_numpy(self, names: list[str]) -> dict[str, np.ndarray]:
        return {name: self._region(name, tuple((0, size) for size in self._metadata[name].shape)) for name in names}

    def _region(self, name: str, wanted: Bounds) -> np.ndarray:
        dtype, filled = jnp.dtype(self._metadata[name].dtype), 0
        region = np.empty([stop - start for start, stop in wanted], dtype)
        for bounds, part, number in self._pieces[name]:
            common = [(max(one[0], two[0]), min(one[1], two[1])) for one, two in zip(bounds, wanted, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            piece = np.frombuffer(self.blob(part, number), dtype).reshape([stop - start for start, stop in bounds])
            if bounds == wanted:
                return piece
            region[_within(common, wanted)] = piece[_within(common, bounds)]
            filled += math.prod(stop - start for start, stop in common)
        if filled != region.size:
            raise CorruptCheckpointError(f"{self.path}: of the array {name!r} {region.size - filled} elements are in no part")
        return region


class _Files(Mapping[str, bytes]):
    """The host state: name → contents, read when asked for."""

    def __init__(self, snapshot: _SnapshotInMemory, blobs: Mapping[str, int]) -> None:
        self._snapshot = snapshot
        self._blobs = blobs

    def __getitem__(self, name: str) -> bytes:
        return bytes(self._snapshot.blob(0, self._blobs[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._blobs)

    def __len__(self) -> int:
        return len(self._blobs)


def _pieces(arrays: Mapping[str, jax.Array]) -> Iterator[tuple[str, Bounds, np.ndarray]]:
    """Copies of the shards that this process has the first copy of."""
    own = [(name, array, shard) for name, array in arrays.items() for shard in array.addressable_shards if not shard.replica_id]
    for _, _, shard in own:
        shard.data.copy_to_host_async()
    for name, array, shard in own:
        if shard.data.size:
            yield name, _bounds(shard.index, array.shape), np.array(shard.data, order="C")


def _bytes_of(values: np.ndarray) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _within(common: Sequence[tuple[int, int]], bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(common, bounds, strict=True))


def is_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether that is the name of a snapshot in memory, and no path."""
    return os.fspath(path).startswith(SCHEME)
