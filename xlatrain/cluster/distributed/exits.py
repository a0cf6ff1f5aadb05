"""Leaving the world: a process that ends abnormally does not wait for the others.

When the interpreter exits, JAX waits at a barrier until every process exits, up to minutes. That is right after a run that went
well: process 0 hosts the coordination service and must be the last. After an error the others will not come; whoever started
the processes must see the failure at once, and end them.

An uncaught exception is seen by ``sys.excepthook``. ``sys.exit(7)`` is not, so ``sys.exit`` is replaced by one that raises a
``SystemExit`` which notices its own end: if nothing caught it, the interpreter drops it with no Python code running. Not seen
are ``raise SystemExit(7)``, and an exit that some frame kept hold of: these wait at JAX's barrier. A runner that executes
a user's script sees everything, and says so with :func:`ends_with`.

Process 0 hosts the coordination service, and JAX's client ends a process (SIGABRT) as soon as that is gone. An interrupt, or an
error in the user's code, is often raised on all processes at once: process 0 leaves the others a moment to say what ended them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from types import TracebackType
from typing import Any, NoReturn

from xlatrain.cluster import watch

GRACE_S = 20.0
"""How long other exit handlers (and threads that are joined) may take after an error before the process is ended anyway."""

PEERS_INTERRUPTED_S = 10.0
"""How long process 0 stays for the others after an interrupt, which each of them gets, and at most as long as they need."""

PEERS_FAILED_S = 2.0
"""How long it stays after an error, which may be its own only: whoever started the processes hears of it that much later."""

_LEFT = "xlatrain/left/"  # below it, in the coordination service: who has ended

_status: int | None = None  # the exit status of an abnormal end that is under way
_farewell: _Farewell | None = None
_interrupted = False
_installed = False


def install() -> None:
    """Watch for an abnormal end of this process, and skip JAX's shutdown barrier then. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous_hook(kind, error, traceback)
        watch.ends_with(error)
        _abnormal(-signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)

    def exit(status: object = None, /) -> NoReturn:
        if status is None or status == 0:
            previous_exit(status)  # pyright: ignore[reportArgumentType]
        global _interrupted
        _interrupted |= isinstance(sys.exception(), KeyboardInterrupt)  # as `Trainer.fit` ends on one
        raise _WatchedExit(status)

    sys.excepthook = excepthook
    sys.exit = exit
    atexit.register(_leave_if_abnormal)  # runs before JAX's own handler, which was registered when jax was imported


class _WatchedExit(SystemExit):
    """A ``SystemExit`` that reports if it ends the interpreter."""

    def __del__(self) -> None:
        caught = sys._getframe().f_back is not None  # whoever catches an exception is still running when it is dropped
        if not caught and threading.current_thread() is threading.main_thread():
            _abnormal(_exit_status(self.code))


def _exit_status(code: object) -> int:
    """The status that the interpreter gives: a number is taken as it is, any other object was printed and is 1."""
    return code & 0xFF if isinstance(code, int) else 1


def ends_with(error: SystemExit) -> None:
    """Note for a runner of a user's script that the interpreter is about to end with ``error``, however it was raised."""
    if _installed and error.code is not None and error.code != 0:
        _abnormal(_exit_status(error.code))


def leave(status: int) -> NoReturn:
    """End this process with ``status``: streams are flushed, no exit handler runs, no barrier is waited at.

    It ends at once; process 0 of several when the others have ended too, but after a few seconds at most
    (:data:`PEERS_INTERRUPTED_S`, :data:`PEERS_FAILED_S`). For a runner that has caught what ended a user's script.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    watch.depart(f"ended with status {status}" if status else None)
    _part_from_peers(PEERS_INTERRUPTED_S if _interrupted or status == -signal.SIGINT else PEERS_FAILED_S)
    if status < 0:  # ended by a signal: die of it, as the interpreter itself does, so that the parent sees it
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _part_from_peers(timeout: float) -> None:
    """Tell the coordination service that this process ends; where it hosts the service, wait until all have said so."""
    jax_distributed = sys.modules.get("jax._src.distributed")
    state = None if jax_distributed is None else jax_distributed.global_state
    if state is None or state.client is None or state.num_processes == 1:
        return
    farewell = _farewell or _Farewell()
    with contextlib.suppress(RuntimeError):  # the interpreter is too far gone to start one
        farewell.say(state, timeout)


class _Farewell(threading.Thread):
    """A thread for last words to the coordination service: a service that is gone, or hangs, must not hold up the exit.

    The thread starts as soon as the end is known: from Python 3.12 on, exit handlers can start none.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._asked = threading.Event()
        self._words: tuple[Any, float] | None = None

    def run(self) -> None:
        self._asked.wait()
        if self._words is not None:
            _say_farewell(*self._words)

    def say(self, state: Any, timeout: float) -> None:
        """Say it, and wait until it is said; ``timeout`` seconds at most for the process that hosts the service."""
        if not self.is_alive():
            self.start()
        self._words = state, time.monotonic() + timeout
        self._asked.set()
        self.join(timeout if state.service is not None else 1.0)


def _say_farewell(state: Any, deadline: float) -> None:
    with contextlib.suppress(Exception):  # the service may be gone already
        state.client.key_value_set(f"{_LEFT}{state.process_id}", "")
        while state.service is not None and time.monotonic() < deadline:
            if len(state.client.key_value_dir_get(_LEFT)) >= state.num_processes:
                time.sleep(0.1)  # they have said so, and are ending
                return
            time.sleep(0.05)


def _abnormal(status: int) -> None:
    global _status, _farewell
    if _status is None:
        _status = status
        _farewell = _Farewell()
        _farewell.start()
        watchdog = threading.Timer(GRACE_S, leave, (status,))
        watchdog.daemon = True
        watchdog.start()


def _leave_if_abnormal() -> None:
    """Leave at once if the exit is abnormal: handlers registered later have run; of the others only Python's own matter."""
    if _status is None:
        watch.depart(None)
        return
    for handler in (logging.shutdown, weakref.finalize._exitfunc, multiprocessing.util._exit_function):  # pyright: ignore
        with contextlib.suppress(Exception):
            handler()  # flushes logs; removes temporary directories; ends workers
    leave(_status)
