"""Ctrl-C that waits for the end of what all processes do together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
