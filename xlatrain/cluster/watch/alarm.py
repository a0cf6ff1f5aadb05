"""The end of a process that has lost a peer: who was lost, its own stacks, its exit status."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import tempfile

from xlatrain.cluster.watch.progress import progress

LOST_PEER = 69
"""Exit status of a process that ended because another one died or hung: ``EX_UNAVAILABLE`` of sysexits.h. Start all again."""

STDERR = 2
_LONGEST = 1 << 16  # bytes of stacks in a message


def say(text: str) -> None:
    """Write a line to standard error, past Python's buffers: the process may be ended at any moment."""
    with contextlib.suppress(OSError):
        os.write(_stderr(), f"xlatrain watch: {text}\n".encode())


def stacks() -> str:
    """The stacks of all Python threads of this process as a text for another one, cut where long."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_LONGEST).decode(errors="replace")


def show_stacks(who: str) -> None:
    """The stacks of all Python threads of this process, on standard error."""
    say(f"stacks of {who}, at step {progress.step} ({progress.phase}):")
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.dump_traceback(_stderr(), all_threads=True)


def delay_abort() -> None:
    """Have SIGABRT end this process 6 s later, so that the watch ends it before, with its own message and status.

    When process 0 is gone, JAX's client aborts the process at the same moment as the watch hears of it, and jaxlib 0.10 cannot
    call a Python function instead (``missed_heartbeat_callback`` ends in ``std::bad_cast``). A Python signal handler would
    not run either: ``abort()`` does not wait for the interpreter. So the handler is C's own ``sleep``, whose argument is the
    signal's number. Only the thread that aborts sleeps; ``abort()`` ends the process when it wakes up.
    """
    faulthandler.disable()  # it calls the handler that it found, after the stacks: it must be the later one
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable(STDERR)


def _stderr() -> int:
    try:
        return sys.__stderr__.fileno() if sys.__stderr__ is not None else STDERR
    except (OSError, ValueError):
        return STDERR
