"""Where this process is: told to the others with every sign of life."""

from __future__ import annotations

import time

COMPILING = "compiling"
"""The phase in which a process may be as long as it needs."""


class Progress:
    """Counts the places that a process has passed. All processes pass the same ones, so that who has passed fewer is behind.

    Attributes:
        marks: how many.
        phase: what it does since the last one, in words.
        step: the optimizer step it is at.
    """

    def __init__(self) -> None:
        self.marks = 0
        self.phase = "starting"
        self.step = 0
        self._at = time.monotonic()

    def mark(self, phase: str, step: int | None = None) -> None:
        """Called where every process comes by, e.g. before and after each batch; costs less than a microsecond."""
        self.marks += 1
        self.phase = phase
        if step is not None:
            self.step = step
        self._at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last mark."""
        return time.monotonic() - self._at


progress = Progress()
"""This process's."""
