"""The host's looks at what steps found about their indices: late, and never in the way of the devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.utilities.host_arrays import host_value
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.lower.index_checks import VARIABLE, IndexCheck, finding

_LOOK_AT = 32  # steps that wait; then the older half is looked at, which the devices have done long ago
_COUNTERS = ("global_step", "current_epoch", "batch_idx")


class _Waiting(NamedTuple):
    """A step that nobody has looked at yet; ``packed`` ends with what :func:`finding` reads."""

    step: CapturedStep
    packed: Any
    name: str
    counters: tuple[Any, ...]


class IndexLooks:
    """Findings of steps about their indices, until the host looks: where it reads values, an epoch ends, a checkpoint is saved.

    Every process looks at the same steps at the same time.

    Attributes:
        skipped: the name of the step whose update was skipped inside the program where an index was out of range
            (:class:`~torch_compat.callbacks.non_finite_guard.NonFiniteGuard`), so that a warning is enough; None for none.
    """

    def __init__(self) -> None:
        self.skipped: str | None = None
        self._waiting: deque[_Waiting] = deque()

    def add(self, name: str, step: CapturedStep, packed: Any, numbers: Mapping[str, Any]) -> None:
        """A step has been dispatched.

        Args:
            name: of the step.
            packed: its packed scalars.
            numbers: its host values', the loop's counters among them.
        """
        if not step.index_checks:
            return
        self._waiting.append(_Waiting(step, packed, name, tuple(map(numbers.get, _COUNTERS))))
        if len(self._waiting) >= _LOOK_AT:
            self.look(_LOOK_AT // 2)

    def look(self, steps: int | None = None) -> None:
        """Look at the oldest ``steps`` that wait, or at all.

        Raises:
            IndexError, RuntimeError: stock's error for the first index that is out of range, with the step, the op and the line.
        """
        for _ in range(len(self._waiting) if steps is None else steps):
            waiting = self._waiting.popleft()
            found = finding(waiting.step.index_checks, host_value(waiting.packed))
            if found is None:
                continue
            check, error = found
            if waiting.name == self.skipped:
                rank_zero_warn(f"{_text(waiting, check, error)}\nThe step changed nothing: it was skipped.")
                continue
            self._waiting.clear()
            raise type(error)(f"{_text(waiting, check, error)}\n{_ADVICE}") from None


_ADVICE = (
    "Later steps may have run with what it gave (NaN for what is read, nothing for what is written); no checkpoint was saved. "
    f"{VARIABLE}=0 leaves the check out."
)


def _text(waiting: _Waiting, check: IndexCheck, error: Exception) -> str:
    """Stock's clause, then where."""
    counters = zip(("global_step", "epoch", "batch"), waiting.counters, strict=True)
    named = [f"{name} {value}" for name, value in counters if value is not None]
    line = waiting.step.capture.user_line(check.node)
    where = f", {line}" if line else ""
    return f"{error}\nIn {waiting.name} ({', '.join(named)}): {check.index.op}{where}"
