"""The end of a process that has lost a peer: who was lost, its own stacks, its exit status."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys

from xlatrain.watch.progress import progress

LOST_PEER = 69
"""Exit status of a process that ended because another one died or hung: ``EX_UNAVAILABLE`` of sysexits.h. Start all again."""

STDERR = 2


def say(text: str) -> None:
    """One line on standard error, past Python's buffers: the process may be ended at any moment."""
    with contextlib.suppress(OSError):
        os.write(_stderr(), f"xlatrain watch: {text}\n".encode())


def show_stacks(who: str) -> None:
    """The stacks of all Python threads of this process, on standard error."""
    say(f"stacks of {who}, at step {progress.step} ({progress.phase}):")
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.dump_traceback(_stderr(), all_threads=True)


def _stderr() -> int:
    try:
        return sys.__stderr__.fileno() if sys.__stderr__ is not None else STDERR
    except (OSError, ValueError):
        return STDERR
