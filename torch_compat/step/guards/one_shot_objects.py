"""Iterators, generators and files, which give something else each time that they are asked, and caches.

A capture must leave them as they were, and a compiled step would use them only once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from torch_compat.step.values import policy
from torch_compat.step.values.mocks import is_mock_class
from torch_compat.step.values.user_objects import is_user_class, is_user_object
from xlatrain.bridge.errors import CaptureError, user_line


@functools.cache
def _gives_anew(kind: type) -> bool:
    if is_mock_class(kind):
        return True
    if is_user_class(kind):
        return False  # its changes are seen as those of any object
    return hasattr(kind, "__next__") and not issubclass(kind, io.IOBase)  # print(…, file=…) is no iteration


def is_consumed(value: Any) -> bool:
    """Whether it is an iterator, or a mock."""
    return _gives_anew(type(value))


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator that is not written in Python: what one of the user's changes is seen, and taken back."""
    kind = type(value)
    return _gives_anew(kind) and not is_mock_class(kind)


def holds_consumed(value: Any, depth: int = 0) -> bool:
    """Whether there is one in it: in a container, or an object of the user's."""
    if is_consumed(value):
        return True
    if depth == policy.DEPTH_OF_ITERATORS:
        return False
    held: Any = ()
    if isinstance(value, dict | list | tuple | set | deque):
        held = value.values() if isinstance(value, dict) else value
    elif is_user_object(value):
        held = vars(value).values()
    return len(held) <= policy.FEW and any(holds_consumed(one, depth + 1) for one in tuple(held))


def refuse(text: str) -> NoReturn:
    """Raises:
    CaptureError: always; names the user's line.
    """
    raise CaptureError(
        f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: it uses {text}, an iterator or a mock, "
        "which a compiled step would do only once.\n  Fix: take from it in a hook (on_train_batch_start) or in the dataset; "
        "several loaders can be given to the Trainer as a dict or list."
    )


@contextlib.contextmanager
def emptied() -> Iterator[None]:
    """Empty the caches of ``functools.cache`` that a capture fills with tensors without values, at its end."""
    _FILLED.append({})
    try:
        yield
    finally:
        forget_cached()
        _FILLED.pop()


_FILLED: list[dict[Any, int]] = []


def note_cache(cache: Any) -> None:
    """A function that keeps its results may be called in a capture."""
    if _FILLED:
        _FILLED[-1].setdefault(cache, cache.cache_info().misses)


def forget_cached() -> None:
    """Empty the caches that a run of a step being captured has filled: another run may begin."""
    for cache, misses in _FILLED[-1].items() if _FILLED else ():
        if cache.cache_info().misses != misses:
            cache.cache_clear()


def keep_cached(cache: Any) -> None:
    """A function that keeps its results was called in a capture, and all that it has computed so far has no tensors in it."""
    if _FILLED and cache in _FILLED[-1]:
        _FILLED[-1][cache] = cache.cache_info().misses
