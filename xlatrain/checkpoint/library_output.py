"""Output of Orbax, asyncio and TensorStore while a save fails, pages for each array: kept back, the error says it in a line.

``XLATRAIN_VERBOSE=1`` shows it all.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

VERBOSE = "XLATRAIN_VERBOSE"
_ABSL = "absl"


def is_verbose(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``XLATRAIN_VERBOSE`` asks for everything: what libraries print, and whole tracebacks."""
    return environment.get(VERBOSE, "0") not in ("", "0")


class _Kept(logging.Filter):
    """Warnings and errors of Orbax, instead of printing them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or f"{os.sep}orbax{os.sep}" not in record.pathname:
            return True
        self.records.append(record)
        return False


class KeptBack:
    """From its making to :meth:`end`, which is the writing of one save, warnings and errors of Orbax are not printed."""

    def __init__(self) -> None:
        self._kept = None if is_verbose() else _Kept()
        logger = logging.getLogger(_ABSL)
        for earlier in [one for one in logger.filters if isinstance(one, _Kept)]:
            logger.removeFilter(earlier)  # of a save that has failed
        if self._kept is not None:
            logger.addFilter(self._kept)
            _Late.watch()

    def end(self, *, saved: bool) -> None:
        """Print the errors that were kept if the writing has succeeded all the same; if not, its error says what is to be said.

        After a failure it goes on until the next save: Orbax's other threads fail one by one.
        """
        if self._kept is None or not saved:
            return
        logger = logging.getLogger(_ABSL)
        logger.removeFilter(self._kept)
        for record in self._kept.records:
            if record.levelno >= logging.ERROR:
                logger.handle(record)


class _Late:
    """In place of ``sys.unraisablehook``: TensorStore completes what Orbax has given up, into an event loop that is closed, or
    with the error of one more part of an array that could not be read."""

    def __init__(self, before: Any) -> None:
        self._before = before

    @classmethod
    def watch(cls) -> None:
        """For good: what is under way may end long after the save or the read has failed."""
        if not isinstance(sys.unraisablehook, cls):
            sys.unraisablehook = cls(sys.unraisablehook)

    def __call__(self, unraisable: Any) -> None:
        text = str(unraisable.exc_value)
        closed = text == "Event loop is closed" and unraisable.object is None
        if not (closed or text.startswith("Encountered error while reading array index")):
            self._before(unraisable)


def watch_reads() -> None:
    """Parts of arrays that fail after the first are not printed: the error of the first says it."""
    if not is_verbose():
        _Late.watch()
