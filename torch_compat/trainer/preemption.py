"""SIGTERM during ``fit``: every process saves at the same batch boundary, and the run ends with a status that says so.

Schedulers (SLURM, Kubernetes, TPU maintenance events) send SIGTERM some time before they take a machine away, to one process or
to all. Whoever gets it tells the others through JAX's coordination service, without a device; a thread of each
process says how far it is, and all go on to one after the farthest and save there. A run that is not preempted pays a lock
that nobody else holds for every batch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.model_checkpoint import ModelCheckpoint
from torch_compat.callbacks.tiered_checkpoint import TieredCheckpoint
from torch_compat.trainer.requeue import next_checkpoint, requeue, requeue_signal
from torch_compat.utilities.exceptions import SIGTERMException
from xlatrain.distributed import Channel, any_process, world
from xlatrain.distributed.world import _jax_state

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

EXIT_STATUS = 75
"""Exit status of a run that was preempted and has saved: ``EX_TEMPFAIL`` of sysexits.h, "try again"."""

NAME = "preempted.ckpt"
"""Name of the checkpoint, in the directory of the first :class:`ModelCheckpoint`."""

_POLL_S = 0.5
_runs = 0


class Preempted(Exception):
    """Leaves the training loop, or a validation inside it, at the boundary at which all processes save."""


class Preemption:
    """Whether this run was asked to end, and where.

    Attributes:
        requested: the signal was received here or elsewhere.
        requeues: it was the one after which SLURM is to queue the job again.
        waiting: the training loop waits for its loader, between two boundaries: one process alone need not wait for the next.
    """

    def __init__(self) -> None:
        global _runs
        _runs += 1
        self.requested = False
        self.requeues = False
        self.waiting = False
        self._key = f"xlatrain/preempted/{_runs}"
        self._channel = Channel(f"preemption-{_runs}")
        self._boundaries = 0
        self._agreed: int | None = None
        self._settled = False
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def at_boundary(self) -> None:
        """Called by every process after every batch of training and of validation during fit.

        Raises:
            Preempted: this is the boundary.
        """
        with self._lock:  # an agreement under way must see no process go on
            self._boundaries += 1
            if world().process_count == 1:
                reached = self.requested
            else:
                reached = self._agreed is not None and self._boundaries >= self._agreed
        if reached:
            raise Preempted

    def finish(self) -> None:
        """Called by every process when training is over: the others do not wait for a boundary of this one."""
        if world().process_count > 1:
            with self._lock:
                self._settle(None)

    def _settle(self, boundaries: int | None) -> None:
        """The one agreement of a run: the boundary after the farthest process's last, or none where a process has finished.

        Not in the main thread while it trains: that may be in a save, which waits for the other processes' main threads.
        """
        if self._settled:
            return
        self._settled = True
        everybody = self._channel.all_gather(boundaries)
        self._agreed = None if None in everybody else max(everybody) + 1

    def notice(self, number: int) -> None:
        """The signal came to this process; may be called in any thread."""
        if self.requested:
            return
        self.requeues = number != signal.SIGTERM
        self.requested = True
        print(
            f"{signal.Signals(number).name}: the run saves a checkpoint at the next batch boundary and ends (a compilation under "
            "way is finished first)",
            file=sys.stderr,
            flush=True,
        )
        if world().process_count > 1:
            _jax_state().client.key_value_set(self._key, str(int(self.requeues)), allow_overwrite=True)

    def watch(self) -> None:
        """Learn of SIGTERM anywhere, and agree on where to save; in a thread of its own."""
        client = _jax_state().client
        while not self._closed.wait(_POLL_S):
            try:
                requeues = client.key_value_try_get(self._key) == "1"
            except Exception:  # not there, which is an error of the service, or the service is gone: others will say so
                continue
            self.requeues = self.requeues or requeues
            self.requested = True
            with self._lock:
                self._settle(self._boundaries)
            return

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()


@contextmanager
def listening(trainer: Trainer) -> Iterator[None]:
    """For the time of a fit SIGTERM, and SLURM's signal before it queues the job again (:mod:`.requeue`), ask for a checkpoint
    (``trainer.preemption``); where that cannot be, nothing changes.

    It needs the main thread, that nobody else handles the signal, and for SIGTERM a :class:`ModelCheckpoint`.
    """
    asking = [*([signal.SIGTERM] if _directory(trainer) is not None else []), *filter(None, [requeue_signal(trainer)])]
    main = threading.current_thread() is threading.main_thread()
    free = [number for number in asking if main and signal.getsignal(number) == signal.SIG_DFL]
    if not asking or not (free or world().process_count > 1) or trainer.fast_dev_run:
        yield
        return
    preemption = trainer.preemption = Preemption()
    watcher = threading.Thread(target=preemption.watch, name="xlatrain-preemption", daemon=True)
    if world().process_count > 1:
        watcher.start()
    try:
        with _notified(preemption, free) if free else contextlib.nullcontext():
            yield
    finally:
        trainer.preemption = None
        preemption.close()
        if watcher.is_alive():
            watcher.join()


@contextmanager
def _notified(preemption: Preemption, signals: Sequence[int]) -> Iterator[None]:
    """Hear of signals in a thread: Python's own handlers run in the main thread only, which a compilation may keep busy."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    previous = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

    def read() -> None:
        while data := ours.recv(64):
            for number in data:
                if number in signals:
                    preemption.notice(number)
            if previous != -1:
                os.write(previous, data)

    reader = threading.Thread(target=read, name="xlatrain-sigterm", daemon=True)
    reader.start()

    def handle(number: int, _: object) -> None:
        preemption.notice(number)
        if preemption.waiting and world().process_count == 1:
            raise Preempted

    for number in signals:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(previous)
        theirs.close()
        reader.join()
        ours.close()


def save_and_end(trainer: Trainer) -> Any:
    """Save where all processes are, and end the run.

    Raises:
        SIGTERMException: a ``SystemExit`` with :data:`EXIT_STATUS`, when the checkpoint is committed.
    """
    assert trainer.preemption is not None
    trainer.received_sigterm = True
    directory = _directory(trainer)
    if any_process(trainer.preemption.requeues) or directory is None:
        path = trainer.strategy.broadcast(next_checkpoint(trainer))
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            print(f"saved {path}; fit continues from it in the next run of this job", file=sys.stderr, flush=True)
            requeue()
        raise SIGTERMException(EXIT_STATUS)
    path = os.path.join(directory, NAME)
    trainer.save_checkpoint(path)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, TieredCheckpoint) and trainer.is_global_zero:
            callback.copy_durably(path)
    if trainer.is_global_zero:
        print(f"preempted: saved {path}; continue with fit(ckpt_path='auto')", file=sys.stderr, flush=True)
    raise SIGTERMException(EXIT_STATUS)


def _directory(trainer: Trainer) -> str | None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            return callback.dirpath or callback._resolve_dirpath(trainer)
    return None


def checkpoint_of(directory: str) -> str:
    """Where a preempted run with that checkpoint directory has saved."""
    return str(Path(directory) / NAME)
