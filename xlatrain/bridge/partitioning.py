"""What a lowering must know of the mesh that its program is partitioned for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_REPEATED: ContextVar[bool] = ContextVar("repeated", default=False)


def batches_are_repeated() -> bool:
    """Whether several devices have the same rows of a batch: those of a ``tensor`` axis, for one."""
    return _REPEATED.get()


@contextlib.contextmanager
def repeated_batches(repeated: bool) -> Iterator[None]:
    """While a graph is lowered: whether batches are repeated so."""
    token = _REPEATED.set(repeated)
    try:
        yield
    finally:
        _REPEATED.reset(token)
