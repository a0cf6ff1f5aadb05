"""Waiting for a compiler that says nothing: a line every now and then that it goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def told(what: str, progress: Callable[[str], None], first_s: float = 5.0) -> Iterator[None]:
    """A thread that tells ``progress`` during the block that ``what`` goes on: after ``first_s`` seconds, when they doubled."""
    done = threading.Event()

    def tell() -> None:
        start, pause = time.monotonic(), first_s
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
