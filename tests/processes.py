"""Waits of tests for other processes. How long is no claim: these limits only end a test that would never end."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 120
"""For what takes a second or two: machines that run tests may be very busy."""


def wait_for(what: Callable[[], object]) -> None:
    """Until ``what`` gives something true."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """The process has ended; nobody may have asked for its status yet, and in a container nobody may ever."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
