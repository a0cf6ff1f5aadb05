"""The progress of a search: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm


class Bar:
    """A progress bar of candidates that are done, of all; with the time that is left.

    Args:
        total: candidates.
        budget_s: seconds of the whole search.
        say: told each candidate where stderr is no terminal.
    """

    def __init__(self, total: int, budget_s: float, say: Callable[[str], None]) -> None:
        self._total, self._budget_s, self._say = total, budget_s, say
        self._start = time.monotonic()
        self._bar = tqdm(total=total, desc="xlatrain preflight", unit="candidate", leave=False) if sys.stderr.isatty() else None

    def at(self, number: int, what: str) -> None:
        """Candidate ``number`` is next."""
        if self._bar is None:
            spent = time.monotonic() - self._start
            self._say(f"candidate {number} of {self._total}, {spent:,.0f} of {self._budget_s:,.0f} s: {what}")
        else:
            self._bar.n = number - 1  # those before it are done, or were found done
            self._bar.set_postfix_str(what)

    def tell(self, text: str) -> None:
        """Tell what is done for this candidate; a line of its own would break the bar."""
        if self._bar is None:
            self._say(text)
        else:
            self._bar.refresh()

    def end(self, left: int) -> None:
        """The search is over; so many candidates were not looked at."""
        if self._bar is not None:
            self._bar.close()
        if left:
            self._say(f"the time is over: {left} of {self._total} candidates are left; the same command goes on from there")
