"""Eager steps on several processes: every process computes the whole batch, so there is one world, in steps and in hooks.

What a step or a hook finds is then the same on all processes, and collectives over processes would count it once for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_runs = 0


@contextlib.contextmanager
def replicated_eager() -> Iterator[None]:
    """Within the block, which is a run or the rest of one, all steps see the whole batch on every process."""
    global _runs
    _runs += 1
    try:
        yield
    finally:
        _runs -= 1


def is_one_world() -> bool:
    """Whether such a run is on."""
    return _runs > 0
