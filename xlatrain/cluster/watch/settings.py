"""Settings of the watch: how long it waits for what."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from xlatrain.cluster.launch import SECRET

SWITCH = "XLATRAIN_WATCH"
DEAD_AFTER = "XLATRAIN_DEAD_AFTER"
HANG_AFTER = "XLATRAIN_HANG_AFTER"
JOIN_WITHIN = "XLATRAIN_JOIN_WITHIN"
SLOW_AFTER = "XLATRAIN_SLOW_AFTER"


@dataclass(frozen=True)
class WatchSettings:
    """Settings of the watch; process 0's settings apply to all processes.

    Attributes:
        dead_after: seconds without a sign of life after which a process is lost. (One that ends is seen at once.) Less than
            JAX's own 100 s, so that it is named before JAX ends the others.
        hang_after: seconds without progress inside a run after which the process that is behind is lost; 0: never. None:
            what the run says (``Strategy.timeout_s``).
        slow_after: seconds without progress of all after which the process that the others wait for is named, with its stacks;
            nothing is ended. 0: never.
    """

    dead_after: float = 60.0
    hang_after: float | None = None
    slow_after: float = 45.0

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> WatchSettings:
        """The settings of ``XLATRAIN_DEAD_AFTER``, ``XLATRAIN_HANG_AFTER`` and ``XLATRAIN_SLOW_AFTER``.

        Raises:
            ValueError: no positive number of seconds.
        """
        dead, hang = seconds(DEAD_AFTER, environment), seconds(HANG_AFTER, environment, least=0.0)
        slow = seconds(SLOW_AFTER, environment, least=0.0)
        return cls(cls.dead_after if dead is None else dead, hang, cls.slow_after if slow is None else slow)

    def beat(self, processes: int) -> float:
        """Seconds between two signs of life: process 0 hears at most a few hundred in a second."""
        return max(0.1, min(self.dead_after / 5, max(1.0, processes / 200)))


def is_on(environment: Mapping[str, str] = os.environ) -> bool:
    """``XLATRAIN_WATCH=0``, the same on every process, leaves all to JAX.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = environment.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}={value!r}; expected 1 (the default) or 0")
    return value == "1"


def secret(environment: Mapping[str, str] = os.environ) -> str | None:
    """The launch's; None: processes believe each other without a proof."""
    return environment.get(SECRET) or None


def seconds(name: str, environment: Mapping[str, str] = os.environ, least: float = 0.5) -> float | None:
    """A variable's value; None where it is not set.

    Raises:
        ValueError: no number of seconds, or less than ``least``.
    """
    value = environment.get(name)
    if not value:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise ValueError(f"{name}={value!r}; expected a number of seconds, at least {least:g}")
    return number
