"""Facts about the mesh, for lowerings: whether the program is partitioned over several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_PARTITIONED: ContextVar[bool] = ContextVar("partitioned", default=False)


def is_partitioned() -> bool:
    """Whether the program is for several devices."""
    return _PARTITIONED.get()


@contextlib.contextmanager
def partitioned(value: bool) -> Iterator[None]:
    """Set whether the program is for several devices, while a graph is lowered in the block."""
    token = _PARTITIONED.set(value)
    try:
        yield
    finally:
        _PARTITIONED.reset(token)
