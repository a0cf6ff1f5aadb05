"""The fast path of a capture: the ops of a run are recorded, and the graph is made from the record.

The switch is here. Without it a capture traces each op as it runs, which gives the same graph and takes several times as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SWITCH = "XLATRAIN_RECORDED_CAPTURES"

_OP_BY_OP: ContextVar[bool] = ContextVar("xlatrain_op_by_op", default=False)


def is_enabled() -> bool:
    """Whether ops may be recorded, and what an op becomes in a graph be copied: unless the user has set :data:`SWITCH` to 0."""
    return os.environ.get(SWITCH) != "0"


def is_on() -> bool:
    """Whether the function that is captured here and now is recorded: :func:`is_enabled`, and not in :func:`op_by_op`."""
    return is_enabled() and not _OP_BY_OP.get()


@contextmanager
def op_by_op() -> Iterator[None]:
    """Within the block functions are captured op by op: for those that have turned out not to be recordable."""
    token = _OP_BY_OP.set(True)
    try:
        yield
    finally:
        _OP_BY_OP.reset(token)
