"""Agreement between processes over JAX's coordination service.

No device takes part, so a background thread may use it while the main thread runs programs: a device collective from a
second thread could interleave with the step's own collectives and deadlock. Ctrl-C waits for the end of what all do together.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax

from xlatrain.checkpoint.errors import CheckpointError

TIMEOUT_S = 3600
"""How long a process waits for its peers: writing the shards of a large model to a slow disk may take this long."""

_PREFIX = "xlatrain/checkpoint"
_meetings = itertools.count()


def _client() -> Any:
    # JAX has no public accessor of the coordination client; this name is what multihost_utils and Orbax use (jax 0.10, 0.11).
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise CheckpointError(
            f"there are {jax.process_count()} processes, but jax.distributed is not initialized: processes cannot agree on a "
            "checkpoint; call xlatrain.cluster.distributed.initialize() first"
        )
    return client


class Rendezvous:
    """A sequence of points at which all processes meet, or all learn which of them failed.

    Every process makes its rendezvous in the same order (a save is collective). In one process every call is free. Several
    threads may meet here (Orbax's writer does): whoever comes after the failure of one of them does not wait for other
    processes, which are gone from here.
    """

    def __init__(self) -> None:
        self._key = f"{_PREFIX}/{next(_meetings)}"
        self._points = itertools.count()
        self._failure = ""
        self._lock = threading.Lock()

    def meet(self) -> None:
        """Wait for all processes; raises on every one of them if any failed."""
        self._settle("")

    def fail(self, failure: str) -> None:
        """Tell the others that this process failed instead of meeting; no process meets here again.

        As well as can be: a process that fails because the others are gone cannot tell them.
        """
        if self._failure:
            return
        try:
            self._settle(failure)
        except (CheckpointError, jax.errors.JaxRuntimeError):
            return

    def tell(self, value: str) -> str:
        """Process 0's value, on every process."""
        if jax.process_count() == 1:
            return value
        key = f"{self._key}/told/{next(self._points)}"
        if jax.process_index() == 0:
            _client().key_value_set(key, "=" + value)
        return _client().blocking_key_value_get(key, TIMEOUT_S * 1000)[1:]

    def close(self) -> None:
        """Forget the keys; call it when every process is known to be past the last point (at the next rendezvous)."""
        if jax.process_count() > 1 and jax.process_index() == 0:
            _client().key_value_delete(self._key + "/")

    def _settle(self, failure: str) -> None:
        point = self._next_point(failure)
        if jax.process_count() == 1:
            return
        # Values carry a leading mark because the service treats an empty value as absent in some versions.
        _client().key_value_set(f"{point}/{jax.process_index()}", "=" + failure)
        verdict = self._judge(point) if jax.process_index() == 0 else None
        if verdict is None:
            verdict = _client().blocking_key_value_get(f"{point}/verdict", TIMEOUT_S * 1000)[1:]
        if verdict:
            self._failure = verdict
            raise CheckpointError(verdict)

    def _next_point(self, failure: str) -> str:
        with self._lock:
            if self._failure:
                raise CheckpointError(self._failure)
            self._failure = failure
            return f"{self._key}/{next(self._points)}"

    def _judge(self, point: str) -> str:
        failures = []
        for process in range(jax.process_count()):
            said = _client().blocking_key_value_get(f"{point}/{process}", TIMEOUT_S * 1000)[1:]
            if said:
                failures.append(f"process {process}: {said}")
        verdict = "; ".join(failures)
        _client().key_value_set(f"{point}/verdict", "=" + verdict)
        return verdict


@contextmanager
def interrupts_held() -> Iterator[None]:
    """SIGINT is handled at the end of the block, as it would have been at once; a second one does not wait.

    A process that left an agreement half-way would keep the others there. Outside of the main thread nothing changes: handlers
    do not run there.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    interrupted = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            handler(number, frame)
        interrupted = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupted:
        handler(signal.SIGINT, None)
