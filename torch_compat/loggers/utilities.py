"""Helpers of the trainer and the progress bars for a list of loggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def combined_version(loggers: Sequence[Any], separator: str = "_") -> int | str:
    """The version of a single logger as it is; of several, their different versions joined in order."""
    if len(loggers) == 1:
        return loggers[0].version
    return separator.join(dict.fromkeys(str(logger.version) for logger in loggers))
