"""Waiting for a compiler that says nothing: a line every now and then that it goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_FIRST_S = 5.0


@contextlib.contextmanager
def told(what: str, progress: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, ``progress`` is told after 5, 10, 20, 40, … seconds that ``what`` goes on, by a thread of its own."""
    done = threading.Event()

    def tell() -> None:
        start, pause = time.monotonic(), _FIRST_S
        while not done.wait(pause):
            spent = time.monotonic() - start
            progress(f"{what} goes on: {spent:,.0f} s so far")
            pause = spent

    thread = threading.Thread(target=tell, name="xlatrain-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
