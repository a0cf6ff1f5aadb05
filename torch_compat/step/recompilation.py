"""Compilations after the first: what changed, how often, and whether that is still allowed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch_compat.run.report import ExecutorLog
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn

VARIABLE = "XLATRAIN_NO_RECOMPILATION_AFTER"
_WARN_AT = (4, 16)
_ADVICE = (
    "Every new shape and every change of a host value that the step branches on is compiled again: pad batches to few lengths "
    "(torch_compat.utilities.padding), drop the last batch (drop_last=True), keep changing values in tensors or in plain number "
    "attributes."
)

_TEXTS = (
    " A text of the batch that the step takes out and does not pass on counts as read, since compiled code (a tokenizer) may "
    "have read it: have collate_fn put texts into a list (which may be unpacked), or take them out before the step, in "
    "on_before_batch_transfer."
)

Facts = Mapping[str, str]
"""What a compiled variant depends on: a name that the user knows (``batch["x"]``, ``self.beta``) → its value as text."""


class RecompilationError(RuntimeError):
    """A step was compiled again although that was forbidden by now."""


class Recompilations:
    """Follows the compilations of one run.

    Args:
        log: of the run; receives a line for each recompilation.
        forbidden_after: training batches after which a recompilation is an error; None: never.
    """

    def __init__(self, log: ExecutorLog, forbidden_after: int | None) -> None:
        self._log = log
        self._forbidden_after = forbidden_after
        self._known: dict[str, list[Facts]] = {}
        self._compiled: Counter[str] = Counter()

    def forget(self, step: str) -> None:
        """Let go of the facts of a step that is no more."""
        self._known.pop(step, None)
        self._compiled.pop(step, None)

    def count_capture(self, step: str, facts: Facts, *, compiled: bool = True) -> None:
        """``step`` was captured because of ``facts``; unless ``compiled``, a program that it has already does for them too.

        Raises:
            RecompilationError: not for the first time, and too late.
        """
        known = self._known.setdefault(step, [])
        before = list(known)
        known.append(facts)
        self._compiled[step] += compiled
        if not before or not compiled:
            return
        change = f"{step}: {_closest_change(before, facts)}"
        self._log.recompilations.append(change)
        if self._forbidden_after is not None and self._log.steps > self._forbidden_after:
            raise RecompilationError(
                f"{change}\n  needs another compilation after {self._log.steps} training batches, but none is allowed after "
                f"{self._forbidden_after} ({VARIABLE}, or the strategy's no_recompilation_after). {_advice(change)}"
            )
        if self._compiled[step] in _WARN_AT:
            recent = "\n  ".join(self._log.recompilations[-3:])
            rank_zero_warn(
                f"{step} was compiled {self._compiled[step]} times in this run, lately because of\n  {recent}\n{_advice(recent)}"
            )


def _advice(changes: str) -> str:
    return _ADVICE + (_TEXTS if "value of batch leaf" in changes else "")


def forbidden_after(configured: int | None) -> int | None:
    """The training batches after which nothing may be compiled again: the environment variable, else what is configured.

    Raises:
        MisconfigurationException: not a number of batches.
    """
    given: Any = os.environ.get(VARIABLE, configured)
    if given is None:
        return None
    try:
        number = int(given)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise MisconfigurationException(
            f"{VARIABLE} (or no_recompilation_after) is {given!r}; expected a number of batches, 0 or more"
        )
    return number


def _closest_change(known: Sequence[Facts], now: Facts) -> str:
    """The changes from the known program that differs least."""
    changes = [_changes(facts, now) for facts in known]
    found = min(reversed(changes), key=len)
    return "; ".join(found) or "the same values in another order"


def _changes(before: Facts, now: Facts) -> list[str]:
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name}: {before.get(name, 'absent')} → {now.get(name, 'absent')}" for name in names if before.get(name) != now.get(name)
    ]
