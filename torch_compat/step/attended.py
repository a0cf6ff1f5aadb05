"""Steps whose Python runs before each of their programs, since it does on the host what no record can stand for.

A step that draws from a generator outside of the module, writes to a file in memory, or counts in a global does something else
each time. Its Python runs on fake tensors for every batch then. Where the same ops come of it, the program of an earlier batch
serves, and what the run has changed on the host is put there once the program has run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.errors import BridgeError, let_go

_MOST = 8
"""Programs of a step, if few of them come again."""


class AttendedStep:
    """A step whose Python runs before each of its programs.

    Args:
        name: of the step.
        reason: why no run of its Python stands for several batches.
    """

    def __init__(self, name: str, reason: BridgeError) -> None:
        self._name = name
        self.reason = reason
        let_go(reason)
        self._runs: Counter[Callable[..., Any]] = Counter()

    def count(self, program: Callable[..., Any]) -> int:
        """Count a run of a program; gives how often it has run before.

        Raises:
            BridgeError: the reason for which the step is attended, where it needs other programs all the time.
        """
        if not self._runs:
            rank_zero_warn(f"{self._name} runs its Python for every batch, beside its compiled program: {self.reason}")
        before = self._runs[program]
        self._runs[program] += 1
        if len(self._runs) > _MOST and self._runs.total() < 2 * len(self._runs):
            raise self.reason
        return before
