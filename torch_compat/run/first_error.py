"""The first error is the one that is raised: what fails after it, while things are given back, is told beside it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

from torch_compat.utilities.rank_zero import rank_zero_warn


def run_all(parts: Iterable[Callable[[], object]], first: BaseException | None = None) -> None:
    """Call all ``parts``, also after one of them has failed.

    Args:
        parts: give back what a run has taken.
        first: the error that ended the run, which the caller raises.

    Raises:
        Exception: the first error of a part, unless there is a ``first``.
    """
    raised: Exception | None = None
    for part in parts:
        try:
            part()
        except Exception as error:
            if first is not None:
                _tell_beside(first, error)
            elif raised is not None:
                _tell_beside(raised, error)
            else:
                raised = error
    if raised is not None:
        raise raised


def _tell_beside(first: BaseException, error: Exception) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = f"Afterwards, while the run was taken down, {type(error).__name__} was raised{where}: {error}"
    if isinstance(first, Exception):
        first.add_note(text)
    else:  # KeyboardInterrupt and SystemExit end a process without their notes
        rank_zero_warn(text)
