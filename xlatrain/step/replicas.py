"""Silent data corruption, seen by comparing replicas: devices that should hold the same bits, and do not.

A device that computes wrongly, or whose memory lost a bit, raises no error. But whatever is replicated in a sharded state
(parameters of data-parallel training, their optimizer state) is computed by every replica for itself, so that they must be equal
bit by bit. One program sums up each device's own bits of each array and gathers the sums: the state is read once, and four bytes
for each array and device go over the network. An array that is split over all devices has no replica, and cannot be checked so.
"""

from __future__ import annotations

import math
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain.cluster import distributed
from xlatrain.mesh.mesh import is_multiprocess
from xlatrain.mesh.sharding import replicated
from xlatrain.xla.compiler_options import compiler_options


class SilentDataCorruptionError(RuntimeError):
    """Replicas that must be equal bit by bit are not."""


@dataclass(frozen=True)
class Disagreement:
    """An array, or a shard of one, of which replicas hold different bits.

    Attributes:
        path: of the array in its tree, e.g. ``params.layer.weight``.
        odd: the devices that hold other bits than most; all replicas where no bits have a majority.
        others: the devices that hold those of the majority; empty where there is none.
    """

    path: str
    odd: tuple[Any, ...]
    others: tuple[Any, ...]


class ReplicaCheck:
    """Compares replicas of the arrays of states that live on one mesh; collective.

    Args:
        mesh: with several devices.

    Attributes:
        checks: how many were made.
        seconds: that they took, from when the devices had nothing else to do.
        compile_s: that compiling their programs took.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.checks = 0
        self.seconds = self.compile_s = 0.0
        names = distributed.all_gather_object(socket.gethostname()) if is_multiprocess(mesh) else [socket.gethostname()]
        self._hosts = dict(enumerate(names)) if len(names) > 1 else {jax.process_index(): names[0]}
        self._sums: dict[Any, ReplicaSums] = {}

    def sums_of(self, tree: Any) -> ReplicaSums:
        """The program for a pytree of this structure and these shardings, compiled when it first runs."""
        leaves, structure = jax.tree.flatten(tree)
        key = (structure, *[(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves])
        if key not in self._sums:
            self._sums[key] = ReplicaSums(tree, self.mesh)
        return self._sums[key]

    def disagreements(self, tree: Any) -> list[Disagreement]:
        """The arrays of which replicas differ; waits for the devices."""
        sums = self.sums_of(tree)
        jax.block_until_ready(tree)
        started = time.monotonic()
        found = sums.disagreements(sums.checksums(tree))
        took = time.monotonic() - started
        if sums.is_new:
            sums.is_new, self.compile_s = False, self.compile_s + took
        else:
            self.seconds += took
        self.checks += 1
        return found

    def check(self, tree: Any, where: str) -> None:
        """Compare the replicas of a state.

        Args:
            tree: on the mesh.
            where: in the run, for the error: ``"at step 400"``.

        Raises:
            SilentDataCorruptionError: names the devices, their hosts and the arrays.
        """
        if found := self.disagreements(tree):
            raise self.error(found, where)

    def error(self, found: Sequence[Disagreement], where: str) -> SilentDataCorruptionError:
        """The error that names the devices and hosts of what was found."""
        return SilentDataCorruptionError(
            f"silent data corruption {where}: {described(found, self._hosts)}. A device computed or kept something wrong: take "
            "its host out of the job (`xlatrain doctor` there says whether its devices compute at all), and continue from the "
            "last checkpoint"
        )


class ReplicaSums:
    """The sums of bits of the arrays of one pytree, whose structure and shardings stay as they are.

    Args:
        tree: arrays on ``mesh``; only their shapes, dtypes and shardings are kept.
        mesh: with several devices.

    Attributes:
        paths: of the arrays that are checked.
        unchecked: path → why an array is not: every shard of it lies on one device, or it is kept in the hosts' memory.
        checked_bytes, unchecked_bytes: of the arrays, each counted once.
        is_new: whether its program has not run yet.
    """

    def __init__(self, tree: Any, mesh: Mesh) -> None:
        self.is_new = True
        self.paths: list[str] = []
        self.unchecked: dict[str, str] = {}
        self.checked_bytes = self.unchecked_bytes = 0
        self._mesh = mesh
        self._devices = mesh.devices.flatten().tolist()
        self._chosen: list[int] = []
        self._shards: list[np.ndarray] = []
        specs: list[PartitionSpec] = []
        places: dict[tuple[Any, tuple[int, ...]], np.ndarray] = {}
        for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
            name, sharding = jax.tree_util.keystr(path, simple=True, separator="."), leaf.sharding
            why = self._why_not(sharding)
            if why is None:
                key = (sharding.spec, leaf.shape)
                if key not in places:
                    places[key] = self._shard_numbers(sharding, leaf.shape)
                if len(set(places[key].tolist())) == len(self._devices):
                    why = "each shard lies on one device"
            if why is not None:
                self.unchecked[name] = why
                self.unchecked_bytes += leaf.nbytes
                continue
            self._chosen.append(index)
            self.paths.append(name)
            self._shards.append(places[key])  # pyright: ignore[reportPossiblyUnboundVariable]  set where `why` is None
            specs.append(sharding.spec)
            self.checked_bytes += leaf.nbytes
        self._program = _program(mesh, specs)

    def checksums(self, tree: Any) -> np.ndarray:
        """uint32[devices in the mesh's order, arrays of ``paths``]: the sum of each device's own bits; waits for the devices."""
        leaves = jax.tree.leaves(tree)
        return np.asarray(self._program([leaves[index] for index in self._chosen]).addressable_data(0))

    def disagreements(self, checksums: np.ndarray) -> list[Disagreement]:
        """The arrays of which replicas differ, by the sums of :meth:`checksums`."""
        found = []
        for column, (path, shards) in enumerate(zip(self.paths, self._shards, strict=True)):
            holders: dict[int, list[int]] = defaultdict(list)
            for device, shard in enumerate(shards.tolist()):
                holders[shard].append(device)
            for replicas in holders.values():
                sums = checksums[replicas, column]
                if (sums != sums[0]).any():
                    found.append(self._disagreement(path, replicas, sums.tolist()))
        return found

    def _disagreement(self, path: str, replicas: Sequence[int], sums: Sequence[int]) -> Disagreement:
        (most, count), *rest = Counter(sums).most_common()
        tie = bool(rest) and rest[0][1] == count
        odd = [self._devices[one] for one, own in zip(replicas, sums, strict=True) if tie or own != most]
        others = [self._devices[one] for one, own in zip(replicas, sums, strict=True) if not tie and own == most]
        return Disagreement(path, tuple(odd), tuple(others))

    def _why_not(self, sharding: Any) -> str | None:
        if sharding.memory_kind not in (None, self._devices[0].default_memory().kind):
            return f"in {sharding.memory_kind} memory"
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self._mesh:
            return "not on the whole mesh"
        return None

    def _shard_numbers(self, sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
        """int[devices]: devices with one number hold one shard."""
        numbers: dict[Any, int] = {}
        where = sharding.devices_indices_map(shape)
        keys = [tuple(part.indices(size)[:2] for part, size in zip(where[one], shape, strict=True)) for one in self._devices]
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def described(found: Sequence[Disagreement], hosts: Mapping[int, str]) -> str:
    """Which devices differ, on which host, in which arrays.

    Args:
        found: at least one.
        hosts: process → the name of its host.
    """
    by_devices: dict[tuple[tuple[Any, ...], int], list[str]] = defaultdict(list)
    for one in found:
        by_devices[one.odd, len(one.others)].append(one.path)
    parts = []
    for (odd, others), paths in by_devices.items():
        names = " and ".join(f"{d.platform}:{d.id} (process {d.process_index}, host {hosts[d.process_index]})" for d in odd)
        arrays = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        if others:
            verb = "holds" if len(odd) == 1 else "hold"
            parts.append(f"{names} {verb} other bits of {arrays} than the {others} replica(s) that agree")
        else:
            parts.append(f"{names} hold different bits of {arrays}, and no bits have a majority: either may be wrong")
    return "; ".join(parts)


def _program(mesh: Mesh, specs: Sequence[PartitionSpec]) -> Callable[[list[jax.Array]], jax.Array]:
    """``arrays -> uint32[devices, arrays]``, whole on every device."""
    axes = tuple(mesh.axis_names)

    def own(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([bit_sum(array) for array in arrays])[None]

    def sums(arrays: list[jax.Array]) -> jax.Array:
        # each device's row is its own: nothing tells XLA that rows of replicas are equal, so that it could leave some out
        return jax.shard_map(own, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(axes), check_vma=False)(arrays)

    return jax.jit(sums, out_shardings=replicated(mesh), compiler_options=compiler_options(mesh))


def bit_sum(array: jax.Array) -> jax.Array:
    """uint32 scalar: the sum of the elements' bits as numbers, each times an odd number of its place, modulo 2³².

    An odd factor has an inverse modulo 2³², so that no change of a single element leaves the sum as it was.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.iscomplexobj(array):
        return bit_sum(array.real) + 3 * bit_sum(array.imag)
    words = _words(array)
    place = jnp.zeros((), jnp.uint32)
    for dim, size in enumerate(words.shape):
        stride = math.prod(words.shape[dim + 1 :]) % (1 << 32)
        place = place + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride) if size else place
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """The bits of each element as uint32: ``[…]``, or ``[…, 2]`` of 64-bit elements."""
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    bits = (jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo)(array.dtype).bits
    if bits < 8:  # packed on some devices; each fits an int8 or a float32
        array = array.astype(jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32)
        bits = 32
    unsigned = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
