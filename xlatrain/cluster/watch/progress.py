"""The progress of this process, told to the others with every sign of life."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

COMPILING = "compiling"
"""The phase in which a process may be as long as it needs."""


class Progress:
    """Counts the marks that a process has passed. All processes pass the same marks, so that the lowest count is behind.

    Attributes:
        marks: how many.
        phase: what it does since the last one, in words.
        step: the optimizer step it is at.
        waiting: the collective call of hosts in which the main thread waits for other processes, by a name that all give it.
    """

    def __init__(self) -> None:
        self.marks = 0
        self.phase = "starting"
        self.step = 0
        self.waiting: str | None = None
        self._at = self._waits_since = time.monotonic()

    def mark(self, phase: str, step: int | None = None) -> float:
        """Called where every process comes by, e.g. before and after each batch; costs less than a microsecond.

        Returns:
            when: ``time.monotonic()``.
        """
        self.marks += 1
        self.phase = phase
        if step is not None:
            self.step = step
        self._at = now = time.monotonic()
        return now

    @property
    def idle_s(self) -> float:
        """Seconds since the last mark."""
        return time.monotonic() - self._at

    @contextlib.contextmanager
    def waiting_at(self, call: str) -> Iterator[None]:
        """Note in the block a collective call of hosts. Only the main thread's count: others may wait while it gets on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._waits_since, self.waiting = time.monotonic(), call
        try:
            yield
        finally:
            self.waiting = None

    @property
    def waits_s(self) -> float:
        """Seconds in the call that ``waiting`` names."""
        return 0.0 if self.waiting is None else time.monotonic() - self._waits_since


progress = Progress()
"""This process's."""
