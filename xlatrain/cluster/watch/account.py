"""Accounting of a run's time: every second belongs to one kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from xlatrain.cluster.watch.progress import COMPILING, progress

KINDS: Mapping[str, str] = {
    "setup": "starting up or ending",
    "compile": COMPILING,
    "data_wait": "waiting for data",
    "step": "training",
    "validation": "validating",
    "save": "saving",
}
"""Each kind of time, with what the watch calls it.

``step`` is what the run is for: all that goes on inside the training loop and is none of the others, hooks and waiting for the
devices included. ``data_wait`` is the host's: the devices may have had work left.
"""


class Account:
    """Seconds of each kind since the run began. Spans nest, and a second belongs to the innermost.

    Args:
        kind: of the time outside of any span.
        told: called with this account now and then, at the end of a span, at most every ``interval`` seconds.
    """

    def __init__(self, kind: str = "setup", told: Callable[[Account], None] | None = None, interval: float = 10.0) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kinds = [kind]
        self._since = self._told_at = time.monotonic()
        self._told = told
        self._interval = interval
        self._spans = {kind: _Span(self, kind) for kind in KINDS}

    def span(self, kind: str) -> _Span:
        """A span of time of that kind, in the thread that runs the loop; a context manager."""
        return self._spans[kind]

    def seconds(self) -> dict[str, float]:
        """Seconds by kind, up to now."""
        found = dict(self._seconds)
        found[self._kinds[-1]] += time.monotonic() - self._since
        return found

    def enter(self, kind: str) -> None:
        """Begin a span, as the ``with`` statement of :meth:`span` does."""
        kinds = self._kinds
        now = progress.mark(KINDS[kind])
        self._seconds[kinds[-1]] += now - self._since
        self._since = now
        kinds.append(kind)

    def exit(self) -> None:
        """And at its end."""
        kinds = self._kinds
        ended = kinds.pop()
        now = progress.mark(KINDS[kinds[-1]])
        self._seconds[ended] += now - self._since
        self._since = now
        if self._told is not None and now - self._told_at > self._interval:
            self._told_at = now
            self._told(self)


class _Span:
    """A context manager that is made once and entered for every batch."""

    __slots__ = ("_account", "_kind")

    def __init__(self, account: Account, kind: str) -> None:
        self._account = account
        self._kind = kind

    def __enter__(self) -> None:
        self._account.enter(self._kind)

    def __exit__(self, *_: object) -> None:
        self._account.exit()
