"""A notice of steps that are compiled for long: to the bar at once, to the log of those that take longer than most."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch_compat.step.run_context import RunContext
from torch_compat.utilities.rank_zero import rank_zero_info
from xlatrain.host.waiting import told

_SILENT_S = 20.0  # a bar on a terminal says at once that a step is compiled; a log hears of what takes longer than most


class CompileNotice:
    """A notice, and the account of a run's time; called with True when compiling begins, with False when it ends.

    Args:
        run: the run.
        seconds: how long it has compiled until now.
    """

    def __init__(self, run: RunContext, seconds: Callable[[], float]) -> None:
        self._run, self._seconds = run, seconds
        self._waiting = contextlib.ExitStack()

    def __call__(self, value: bool) -> None:
        account = self._run.run_time.account
        account.enter("compile") if value else account.exit()
        bar = self._run.progress_bar_callback
        if bar is not None:
            bar.show_compiling(value)
        self._waiting.close()
        if value:
            before = self._seconds()
            what = "compiling a step" + (f" (those before took {before:,.0f} s)" if before else "")
            say = rank_zero_info if bar is None else bar.announce
            self._waiting.enter_context(told(what, say, _SILENT_S))
