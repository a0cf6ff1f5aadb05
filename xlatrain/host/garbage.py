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


@contextlib.contextmanager
def older_left_out() -> Iterator[None]:
    """Let collections in the block, and :func:`gc.get_objects`, leave out what was made before: they walk over all that a process
    holds else, for half a second. Settings of the collector stay what they are, but for :func:`gc.get_freeze_count`.
    """
    if gc.get_freeze_count() > 0:  # by a block around this one; or by somebody whose objects are to stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
