"""Collectives of host objects, between processes.

They go through JAX's coordination service, not through the devices: they may run in any thread and while programs are in flight.
Objects are pickled. A collective takes one to a few milliseconds, whatever the number of processes.
With one process each is free.
"""

from __future__ import annotations

import itertools
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

from xlatrain.cluster.distributed.world import World, _jax_state, world
from xlatrain.cluster.watch import progress

TIMEOUT_S = 1800.0
"""How long a process waits for its peers by default."""

_HEAD = 1 << 14  # bytes of a value that travel with its key; all processes' heads come in one message
_PART = 1 << 20  # bytes of the parts that follow, well below gRPC's message limit of 4 MiB
_SWEEP = 256  # collectives after which the keys of the ones before are forgotten


class Channel:
    """An independent sequence of collectives: every process makes the same calls in the same order.

    Two threads use two channels. A channel is used by one thread at a time.

    Args:
        name: the same on every process, and no other channel's.
        timeout: seconds to wait for the other processes.
    """

    def __init__(self, name: str, timeout: float = TIMEOUT_S) -> None:
        self.name = name
        self.timeout = timeout
        self._count = 0
        self._lock = threading.Lock()

    def broadcast(self, value: Any, src: int = 0, timeout: float | None = None) -> Any:
        """``value`` of process ``src``, on every process.

        Raises:
            TimeoutError: process ``src`` did not come.
        """
        here = world()
        if here.process_count == 1:
            return value
        _check_process(src, here)
        with self._lock:
            key = self._next(here)
            if here.process_id == src:
                _put(key, value)
                return value
            with progress.waiting_at(self._place()):
                return self._get(key, timeout, f"process {src}")

    def all_gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """``value`` of every process, in the order of their ids, on every process.

        Raises:
            TimeoutError: names a process that did not come.
        """
        here = world()
        if here.process_count == 1:
            return [value]
        with self._lock:
            key = self._next(here)
            _put(f"{key}/{here.process_id}", value)
            # Everybody puts, meets, and reads all with one request: the same few requests however many processes there are.
            with progress.waiting_at(self._place()):
                self._meet("gather", timeout)
            found = dict(_client().key_value_dir_get_bytes(f"{key}/"))
            return [self._read(f"{key}/{p}", found[f"{key}/{p}"], timeout) for p in range(here.process_count)]

    def _next(self, here: World) -> str:
        """The key of the next collective. Now and then all meet, and the keys that nobody will read again are deleted."""
        era, self._count = self._count // _SWEEP, self._count + 1
        if era and (self._count - 1) % _SWEEP == 0:
            self._meet("sweep", None)
            if here.process_id == 0:
                for prefix in ("", "parts/"):
                    _client().key_value_delete(f"{prefix}xlatrain/{self.name}/{era - 1}/")
        return f"xlatrain/{self.name}/{era}/{self._count}"

    def _place(self) -> str:
        """The name of the last collective, the same on every process."""
        return f"{self.name}, call {self._count}"

    def _meet(self, what: str, timeout: float | None) -> None:
        client, milliseconds = _client(), self._milliseconds(timeout)
        _named(lambda: client.wait_at_barrier(f"xlatrain/{self.name}/{what}", milliseconds), self.name, "another process")

    def _get(self, key: str, timeout: float | None, peer: str) -> Any:
        client, milliseconds = _client(), self._milliseconds(timeout)
        return self._read(key, _named(lambda: client.blocking_key_value_get_bytes(key, milliseconds), self.name, peer), timeout)

    def _read(self, key: str, head: bytes, timeout: float | None) -> Any:
        count, _, first = head.partition(b":")
        milliseconds = self._milliseconds(timeout)
        rest = [_client().blocking_key_value_get_bytes(f"parts/{key}/{i}", milliseconds) for i in range(1, int(count))]
        return pickle.loads(b"".join([first, *rest]))

    def _milliseconds(self, timeout: float | None) -> int:
        return int(1000 * (self.timeout if timeout is None else timeout))


def _put(key: str, value: Any) -> None:
    """A value, in parts if it is large: the first under ``key``, with the number of parts in front."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    rest = [data[i : i + _PART] for i in range(_HEAD, len(data), _PART)]
    client = _client()
    for i, part in enumerate(rest, 1):
        client.key_value_set_bytes(f"parts/{key}/{i}", part)
    client.key_value_set_bytes(key, b"%d:" % (1 + len(rest)) + data[:_HEAD])


def _named(call: Callable[[], Any], what: str, peer: str) -> Any:
    try:
        return call()
    except Exception as error:
        text = str(error)
        if "DEADLINE_EXCEEDED" not in text:
            raise
        # JAX names its tasks by process id, one on each line.
        missing = re.search(r"timed out task names:\s*((?:\d+\s+)+)", text)
        if missing:
            others = sorted(missing[1].split(), key=int)
            peer = f"process{'es' if len(others) > 1 else ''} {', '.join(others)}"
        raise TimeoutError(
            f"process {world().process_id} waited at {what!r} for {peer}, which did not come; every process must make the same "
            "collective calls in the same order, and all must be alive (is one of them in a branch for process 0 only?)"
        ) from error


def _client() -> Any:
    client = _jax_state().client
    if client is None:
        raise RuntimeError("jax.distributed has been shut down: processes cannot talk to each other any more")
    return client


def _check_process(process: int, here: World) -> None:
    if not 0 <= process < here.process_count:
        raise ValueError(f"src must be a process between 0 and {here.process_count - 1}, not {process}")


_main = Channel("main")


def broadcast_object(value: Any, src: int = 0, *, timeout: float | None = None) -> Any:
    """``value`` of process ``src``, on every process; for the main thread (other threads: a :class:`Channel`).

    Args:
        value: any object that pickles; ignored on the other processes.
        src: the process whose value it is.
        timeout: seconds to wait for it.

    Raises:
        TimeoutError: process ``src`` did not come.
    """
    return _main.broadcast(value, src, timeout)


def all_gather_object(value: Any, *, timeout: float | None = None) -> list[Any]:
    """``value`` of every process, in the order of their ids, on every process.

    Raises:
        TimeoutError: names a process that did not come.
    """
    return _main.all_gather(value, timeout)


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is true on at least one process."""
    return any(all_gather_object(bool(flag)))


def all_processes(flag: bool) -> bool:
    """Whether ``flag`` is true on every process."""
    return all(all_gather_object(bool(flag)))


_visits: dict[str, itertools.count[int]] = {}


def barrier(name: str, timeout: float = TIMEOUT_S) -> None:
    """Wait until every process is here.

    Args:
        name: names the place in the error; the same on every process. It may be visited again.
        timeout: seconds to wait.

    Raises:
        TimeoutError: says where, and which processes did not come.
    """
    here = world()
    if here.process_count == 1:
        return
    visit = next(_visits.setdefault(name, itertools.count()))
    with progress.waiting_at(name if visit == 0 else f"{name}, call {visit + 1}"):
        _named(
            lambda: _client().wait_at_barrier(f"xlatrain/barrier/{name}/{visit}", int(timeout * 1000)), name, "another process"
        )
