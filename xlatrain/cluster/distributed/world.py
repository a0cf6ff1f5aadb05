"""The world of processes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from xlatrain.cluster import watch
from xlatrain.cluster.distributed import exits, gloo, torchrun
from xlatrain.cluster.distributed.cluster import ALONE, ProcessPlace, detect, local_process_id
from xlatrain.cluster.watch.roll_call import listening_address


@dataclass(frozen=True)
class World:
    """The processes of this run, and the index of this process.

    Attributes:
        process_id: 0 to ``process_count - 1``; the same as ``jax.process_index()``.
        process_count: number of processes.
        local_process_id: index among the processes on this host.
        coordinator_address: ``host:port`` of process 0; None if there is one process.
        source: what said so: a launcher's variables, arguments, ….
    """

    process_id: int
    process_count: int
    local_process_id: int
    coordinator_address: str | None
    source: str

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which writes files and speaks."""
        return self.process_id == 0


_world: World | None = None


def world() -> World:
    """The world that :func:`initialize` joined; one process before that. Starts nothing."""
    return _world or _joined_by_jax() or _as_world(ALONE)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    local_process_id: int | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 100,
    shutdown_timeout: int = 300,
    preemption_service: bool = False,
) -> World:
    """Join the world of processes; call it before anything uses a JAX device. One process is a world too.

    The place of this process comes from the arguments; else from the variables of ``xlatrain launch``, torchrun or SLURM; else
    from JAX's own detection (TPU pods, Kubernetes, Open MPI); else this process is alone and nothing is started. A
    second call returns the world that was joined, and so does the first if ``jax.distributed`` is already initialised.

    In a world of several processes one that ends abnormally (an uncaught exception, ``sys.exit`` with another status than 0) does
    not wait for the others at JAX's shutdown barrier. The processes watch each other from here on
    (:mod:`xlatrain.cluster.watch`).

    Args:
        coordinator_address: ``host:port`` on which process 0 listens. With it ``num_processes`` and ``process_id`` are required.
        num_processes: number of processes.
        process_id: this process's index.
        local_device_ids: which of the host's GPUs are this process's; None: all of them, or one each where a launcher
            started several processes on a host.
        local_process_id: this process's index on its host; only told, by ``world().local_process_id``.
        initialization_timeout: seconds to wait for the other processes to join; ``XLATRAIN_JOIN_WITHIN`` is stronger.
        heartbeat_timeout: seconds without a sign of life after which a process counts as dead, and all others are ended.
        shutdown_timeout: seconds that a process that ended well waits for the others.
        preemption_service: let JAX catch SIGTERM for ``multihost_utils.reached_preemption_sync_point``. Off by default: a
            process in which nobody asks for that point would never end at SIGTERM.

    Raises:
        ValueError: arguments or variables that are incomplete or contradict each other.
        RuntimeError: JAX devices were used before, or another world than this one was joined.
        JoinError: processes did not come (it names them), or do not belong together.

    API: https://docs.jax.dev/en/latest/jax.distributed.html
    """
    global _world
    place = _place(coordinator_address, num_processes, process_id, local_device_ids, local_process_id)
    current = _world or _joined_by_jax()
    if current is not None:
        _check_same(current, place, explicit=coordinator_address is not None)
        _world = current
    elif place.process_count == 1:
        return _as_world(place)  # not remembered: a later call may still join a larger world
    else:
        jax.config.update("jax_enable_preemption_service", preemption_service)
        _world = _as_world(_connect(place, initialization_timeout, heartbeat_timeout, shutdown_timeout))
        watch.start(exits.leave, lambda: _jax_state().client is not None)
    exits.install()
    return _world


def _place(
    address: str | None, count: int | None, index: int | None, device_ids: int | Sequence[int] | None, local: int | None
) -> ProcessPlace:
    given = {"coordinator_address": address, "num_processes": count, "process_id": index}
    missing = [name for name, value in given.items() if value is None]
    ids = (device_ids,) if isinstance(device_ids, int) else None if device_ids is None else tuple(device_ids)
    if len(missing) == len(given):
        place = detect()
        if ids is not None:
            place = ProcessPlace(**{**vars(place), "local_device_ids": ids})
        return place
    if count == 1 and index in (0, None):
        return ALONE
    if missing:
        raise ValueError(f"initialize() was given {sorted(set(given) - set(missing))} without {missing}; give all three, or none")
    assert address is not None and count is not None and index is not None
    if not 0 <= index < count:
        raise ValueError(f"process_id must be between 0 and num_processes - 1 = {count - 1}, not {index}")
    if ":" not in address:
        raise ValueError(f"coordinator_address must be host:port, not {address!r}")
    local = local_process_id(address, index) if local is None else local
    return ProcessPlace(address, count, index, local, ids, "the arguments of initialize()")


def _connect(place: ProcessPlace, initialization_timeout: int, heartbeat_timeout: int, shutdown_timeout: int) -> ProcessPlace:
    """Meet the other processes; the place with the address at which process 0 listens."""
    if _backends_are_up():
        raise RuntimeError(
            f"{place.source} say that this is process {place.process_id} of {place.process_count}, but JAX devices were used "
            "before xlatrain.cluster.distributed.initialize() was called; call it first thing in the script"
        )
    if jax.config.jax_cpu_collectives_implementation is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    assert place.coordinator_address is not None
    address = place.coordinator_address
    if place.agent_store:
        address = torchrun.agreed_address(address, place.process_id, initialization_timeout)
    left = watch.join(address, place.process_id, place.process_count, initialization_timeout)
    jax.distributed.initialize(
        address,
        place.process_count,
        place.process_id,
        None if place.local_device_ids is None else list(place.local_device_ids),
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(left),
        heartbeat_timeout_seconds=heartbeat_timeout,
        shutdown_timeout_seconds=shutdown_timeout,
        coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or listening_address(address),
    )
    gloo.listen_at(watch.address())
    return replace(place, coordinator_address=address)


def _check_same(current: World, place: ProcessPlace, *, explicit: bool) -> None:
    asked = (place.process_count, place.process_id)
    if explicit and asked != (current.process_count, current.process_id):
        raise RuntimeError(
            f"this is already process {current.process_id} of {current.process_count} (from {current.source}); it cannot become "
            f"process {place.process_id} of {place.process_count}"
        )


def _joined_by_jax() -> World | None:
    """The world, if the user called ``jax.distributed.initialize`` itself."""
    state = _jax_state()
    if state.client is None or state.num_processes == 1:
        return None
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    return World(state.process_id, state.num_processes, int(local), state.coordinator_address, "jax.distributed.initialize()")


def _as_world(place: ProcessPlace) -> World:
    return World(place.process_id, place.process_count, place.local_process_id, place.coordinator_address, place.source)


def _jax_state() -> Any:
    # No public accessor; the same name in jax 0.10 and 0.11, used by multihost_utils and Orbax too.
    from jax._src import distributed

    return distributed.global_state


def _backends_are_up() -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
