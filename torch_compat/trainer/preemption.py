"""SIGTERM during a run: every process of a fit saves at the same batch boundary, and the run ends with a status that says so.

Without a :class:`ModelCheckpoint` nothing is saved, but the run ends at that boundary all the same: ``on_exception`` is called,
and an :class:`OnExceptionCheckpoint` saves. A handler of the script's is called, too, after ours, as in stock. ``validate`` and
``test`` end after the batch.

Schedulers (SLURM, Kubernetes, TPU maintenance events) send SIGTERM some time before they take a machine away, to one process or
to all. Whoever gets it tells the others through JAX's coordination service, without a device; a thread of each
process says how far it is, and all go on to the first boundary at which every one of them can stop, and save there. A process
that waits for its loader is interrupted, also while the loader is read again up to where a checkpoint was saved. A run that has
not got through a batch has nothing to save, and only ends. One that is not preempted pays two locks that nobody else holds for
every batch.

Before training (hooks, a restore, the optimizers) there is nothing to save: the process ends at once, with the same status
(:class:`_Around`). After it the run ends by itself.

Where JAX's own preemption service is on, it has SIGTERM and agrees on the boundary (:func:`_service_is_on`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jax.experimental import multihost_utils

from torch_compat.callbacks.model_checkpoint import ModelCheckpoint
from torch_compat.callbacks.tiered_checkpoint import TieredCheckpoint
from torch_compat.run.states import TrainerFn
from torch_compat.trainer.requeue import next_checkpoint, requeue, requeue_signal
from torch_compat.utilities.exceptions import SIGTERMException
from xlatrain.cluster.distributed import Channel, any_process, world
from xlatrain.cluster.distributed.world import _jax_state
from xlatrain.mesh.lockstep import drawing_ahead

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

EXIT_STATUS = 75
"""Exit status of a run that was preempted: ``EX_TEMPFAIL`` of sysexits.h, "try again"."""

NAME = "preempted.ckpt"
"""Name of the checkpoint, in the directory of the first :class:`ModelCheckpoint`."""

_POLL_S = 0.5
_END: Any = object()
_service_steps = itertools.count(1)  # of all runs: the service wants them to grow
T = TypeVar("T")
_runs = 0


class Preempted(Exception):
    """The training loop, or a validation inside it, ends at the boundary at which all processes save."""


class Preemption:
    """The state of a preemption: whether this run was asked to end, and where.

    Attributes:
        requested: the signal was received here or elsewhere.
        requeues: it was the one after which SLURM is to queue the job again.
        waiting: the loop waits for its loader, between two boundaries: nothing is lost if that is interrupted.
        at_start: no batch was finished in this run but those of the sanity check: what it began with is all there is. The same
            on every process.

    Args:
        interrupted_by: a signal whose handler in this process calls :meth:`interrupt`, or None.
        service: leave it to JAX's preemption service.
        saves: whether a checkpoint is saved after SIGTERM.
    """

    def __init__(self, *, interrupted_by: int | None = None, service: bool = False, saves: bool = True) -> None:
        global _runs
        _runs += 1
        self.requested = False
        self.requeues = False
        self.waiting = False
        self.at_start = True
        self._interrupted_by = interrupted_by
        self._service = service
        self._saves = saves
        self._key = f"xlatrain/preempted/{_runs}"
        self._channel = Channel(f"preemption-{_runs}")
        self._boundaries = 0
        self._has_batch = False  # the loader has given one: all processes have it, and can get through its step
        self._agreed: int | None = None
        self._settled = False
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def at_boundary(self, *, new: bool = True) -> None:
        """Called by every process after every batch of training and of validation during fit.

        Args:
            new: whether the batch changed anything that can be saved; the sanity check's do not.

        Raises:
            Preempted: this is the boundary.
        """
        with self._lock:  # an agreement under way must see no process go on
            self._boundaries += 1
            self.at_start &= not new
            if self._service:
                reached = self.requested = multihost_utils.reached_preemption_sync_point(next(_service_steps))
            elif world().process_count == 1:
                reached = self.requested
            else:
                reached = self._is_here()
        if reached:
            raise Preempted

    def waits(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate ``batches``, whose loader may be interrupted while it is waited for.

        Raises (from the iterator):
            Preempted: it was, or all processes have agreed on the boundary before.
        """
        iterator = iter(batches)
        while True:
            self.waiting = self._interrupted_by is not None
            batch: Any = next(iterator, _END)
            with self._lock:  # an agreement under way counts on it that nobody goes on
                self.waiting = False
                if self._is_here():
                    raise Preempted
                self._has_batch |= batch is not _END
            if batch is _END:
                return
            yield batch

    @contextmanager
    def reading_again(self) -> Iterator[None]:
        """The loader is waited for before the first boundary: it is read again up to where a checkpoint was saved.

        Raises:
            Preempted: it was interrupted, or all processes have agreed to end here.
        """
        self.waiting = self._interrupted_by is not None
        try:
            yield
        finally:
            with self._lock:
                self.waiting = False
        if self._is_here():
            raise Preempted

    def _is_here(self) -> bool:
        """Whether several processes have agreed on the boundary that was reached last, or on one before."""
        return self._agreed is not None and self._boundaries >= self._agreed

    def interrupt(self) -> None:
        """Called by the signal handler, in the main thread.

        Raises:
            Preempted: this process need not wait for its loader's next batch.
        """
        if self.waiting and (world().process_count == 1 or self._is_here() or self._can_reach_it()):
            self.waiting = False
            raise Preempted

    def _can_reach_it(self) -> bool:
        """Whether the batch up to the agreed boundary is in hand, so that the one that the loader is asked for is not needed."""
        return self._agreed is not None and self._boundaries + 1 >= self._agreed and drawing_ahead()

    def finish(self) -> None:
        """Called by every process when training is over: the others do not wait for a boundary of this one."""
        if world().process_count > 1 and not self._service:
            with self._lock:
                self._settle(None)

    def _settle(self, boundaries: int | None) -> None:
        """The one agreement of a run: the first boundary that every process can still stop at, or none where one has finished.

        A process that waits for its loader can stop at its last boundary, any other at its next. Those that wait are interrupted.

        Not in the main thread while it trains: that may be in a save, which waits for the other processes' main threads.
        """
        if self._settled:
            return
        self._settled = True
        said: list[tuple[int | None, bool]] = self._channel.all_gather((boundaries, self.waiting))
        stops = [reached + (not waiting) for reached, waiting in said if reached is not None]
        if len(stops) < len(said):
            return
        self._agreed = max(stops)
        if self.waiting and self._interrupted_by is not None:  # the handler runs in the main thread, whatever that waits for
            signal.pthread_kill(threading.main_thread().ident or 0, self._interrupted_by)

    def notice(self, number: int) -> None:
        """The signal came to this process; may be called in any thread."""
        if self.requested:
            return
        self.requeues = number != signal.SIGTERM
        self.requested = True
        saves = (
            "saves a checkpoint at the next batch boundary and ends" if self._saves or self.requeues else "ends after the batch"
        )
        print(
            f"{signal.Signals(number).name}: the run {saves} (a compilation under way is finished first)",
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
                if not self._has_batch and not self.waiting:  # another may hang in its loader already: stop where it is, if
                    continue  # this one comes to wait for it
                self._settle(self._boundaries)
            return

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()


def _service_is_on() -> bool:
    """Whether JAX's preemption service runs in this world of several processes: it is JAX's handler that then gets SIGTERM."""
    return world().process_count > 1 and getattr(_jax_state(), "preemption_sync_manager", None) is not None


class _Around:
    """The handler of SIGTERM in a fit before it trains, and after.

    Attributes:
        trained: training is over, or has failed, or this handler has ended the run: what remains is not interrupted.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trained = False
        self._trainer = trainer

    def __call__(self, number: int, _: object) -> None:
        if self.trained:
            return
        self.trained = True
        self._trainer.received_sigterm = True
        print(
            f"{signal.Signals(number).name} before training began: there is nothing new to save; start the run again as it was "
            "started",
            file=sys.stderr,
            flush=True,
        )
        raise SIGTERMException(EXIT_STATUS)


@contextmanager
def around_training(trainer: Trainer) -> Iterator[None]:
    """Give SIGTERM in what is before and after the training of a fit the status that it has in training.

    Where :func:`listening` would not listen, nothing changes.
    """
    main = threading.current_thread() is threading.main_thread() and not _service_is_on()
    saves = any(isinstance(callback, ModelCheckpoint) for callback in trainer.checkpoint_callbacks)
    if not main or not saves or trainer.fast_dev_run or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    handler = _Around(trainer)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_heard(number: int) -> bool:
    """Whether a signal is to be heard: SIGTERM always, others where nobody else handles them."""
    handler = signal.getsignal(number)
    return number == signal.SIGTERM or handler == signal.SIG_DFL or isinstance(handler, _Around)


@contextmanager
def listening(trainer: Trainer) -> Iterator[None]:
    """Let SIGTERM, and SLURM's signal before it queues the job again (:mod:`.requeue`), end a run at a batch boundary.

    They set ``trainer.preemption``; where that cannot be, nothing changes. It needs the main thread.
    """
    trainer.received_sigterm = False
    requeued_by = requeue_signal(trainer) if trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run else None
    service = _service_is_on() and requeued_by is None
    main = threading.current_thread() is threading.main_thread() and not service
    heard = [number for number in (signal.SIGTERM, *filter(None, [requeued_by])) if main and _is_heard(number)]
    if not heard and world().process_count == 1:
        yield
        return
    saves = trainer.state.fn == TrainerFn.FITTING and _directory(trainer) is not None
    preemption = trainer.preemption = Preemption(interrupted_by=heard[0] if heard else None, service=service, saves=saves)
    watcher = threading.Thread(target=preemption.watch, name="xlatrain-preemption", daemon=True)
    if world().process_count > 1 and not service:
        watcher.start()
    try:
        with _notified(preemption, heard, trainer) if heard else contextlib.nullcontext():
            yield
    finally:
        trainer.preemption = None
        preemption.close()
        if watcher.is_alive():
            watcher.join()


@contextmanager
def _notified(preemption: Preemption, signals: Sequence[int], trainer: Trainer | None = None) -> Iterator[None]:
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

    def handle(number: int, frame: Any) -> None:
        preemption.notice(number)
        if trainer is not None and number == signal.SIGTERM:
            trainer.received_sigterm = True
        if callable(scripts := before[number]) and not isinstance(scripts, _Around):
            scripts(number, frame)
        preemption.interrupt()

    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            if isinstance(handler, _Around):
                handler.trained = True
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous)
        theirs.shutdown(socket.SHUT_RDWR)  # workers that live on hold it too
        theirs.close()
        reader.join()
        ours.close()


def save_and_end(trainer: Trainer) -> Any:
    """Save where all processes are, if there is where to, and end the run.

    Raises:
        SIGTERMException: a ``SystemExit`` with :data:`EXIT_STATUS`, when the checkpoint is committed.
    """
    assert trainer.preemption is not None
    trainer.received_sigterm = True
    directory = _directory(trainer)
    requeues = any_process(trainer.preemption.requeues)
    if trainer.state.fn != TrainerFn.FITTING or (directory is None and not requeues):
        raise SIGTERMException(EXIT_STATUS)
    if trainer.preemption.at_start:
        _say(
            trainer, "preempted before a batch was finished: there is nothing new to save; start the run again as it was started"
        )
    elif requeues:
        path = trainer.strategy.broadcast(next_checkpoint(trainer))
        trainer.save_checkpoint(path)
        _say(trainer, f"saved {path}; fit continues from it in the next run of this job")
    else:
        assert directory is not None
        path = os.path.join(directory, NAME)
        trainer.save_checkpoint(path)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, TieredCheckpoint) and trainer.is_global_zero:
                callback.copy_durably(path)
        _say(trainer, f"preempted: saved {path}; continue with fit(ckpt_path='auto')")
    if requeues and trainer.is_global_zero:
        requeue()
    raise SIGTERMException(EXIT_STATUS)


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        print(text, file=sys.stderr, flush=True)


def _directory(trainer: Trainer) -> str | None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not trainer.fast_dev_run:
            return callback.dirpath or callback._resolve_dirpath(trainer)
    return None


def checkpoint_of(directory: str) -> str:
    """The path at which a preempted run with that checkpoint directory has saved."""
    return str(Path(directory) / NAME)
