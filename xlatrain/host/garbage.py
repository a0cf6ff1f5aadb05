"""Garbage collection, held off while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch garbage collection off: where imports, captures and compilers make objects that stay, each full collection walks
    over all that there is, which takes a quarter of a second and finds nothing. For our own code, not around the user's data.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def let_stay() -> None:
    """Count all objects among the oldest, which only full collections look at, without walking over them.

    For imports: what is left of them stays, and would be walked over three times before it is old.
    """
    if gc.get_freeze_count() == 0:  # objects that somebody has frozen are to stay so
        gc.freeze()
        gc.unfreeze()
