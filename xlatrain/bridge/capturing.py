"""Whether a step is being captured: what all of the bridge may ask, below the capture itself."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_CAPTURING = contextvars.ContextVar("xlatrain_capturing", default=False)


def is_capturing() -> bool:
    """Whether a step is being captured (or rehearsed) by the calling thread."""
    return _CAPTURING.get()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Make :func:`is_capturing` true in the block, for the calling thread."""
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)
