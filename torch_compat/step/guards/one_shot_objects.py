"""Iterators, generators and files, which give something else each time that they are asked, and caches.

A capture must leave them as they were, and a compiled step would use them only once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch_compat.step.values.generators import same_state, set_state, state_of, use_of
from torch_compat.step.values.mocks import is_mock_class
from torch_compat.step.values.user_objects import is_user_class, is_user_object
from xlatrain.bridge.errors import CaptureError, user_line

if TYPE_CHECKING:
    from torch_compat.step.values.names import Name

_DEPTH = 3
_LARGE = 64  # entries


@functools.cache
def _gives_anew(kind: type) -> bool:
    if is_mock_class(kind):
        return True
    return hasattr(kind, "__next__") and not issubclass(kind, io.IOBase)  # print(…, file=…) is no iteration


def is_consumed(value: Any) -> bool:
    """Whether it is an iterator, or a mock."""
    return _gives_anew(type(value))


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator that is not written in Python: what one of the user's changes is seen, and taken back."""
    kind = type(value)
    return _gives_anew(kind) and not is_mock_class(kind) and not is_user_class(kind)


def holds_consumed(value: Any, depth: int = 0) -> bool:
    """Whether there is one in it: in a container, or an object of the user's."""
    if is_consumed(value):
        return True
    if depth == _DEPTH:
        return False
    held: Any = ()
    if isinstance(value, dict | list | tuple | set | deque):
        held = value.values() if isinstance(value, dict) else value
    elif is_user_object(value):
        held = vars(value).values()
    return len(held) <= _LARGE and any(holds_consumed(one, depth + 1) for one in tuple(held))


def refuse(text: str) -> NoReturn:
    """Raises:
    CaptureError: always; names the user's line.
    """
    raise CaptureError(
        f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: it uses {text}, an iterator or a mock, "
        "which a compiled step would do only once.\n  Fix: take from it in a hook (on_train_batch_start) or in the dataset; "
        "several loaders can be given to the Trainer as a dict or list."
    )


class OneShotObject:
    """A stand-in for a one-shot object while a step is captured.

    Args:
        text: its name, as a user knows it.
    """

    def __init__(self, text: str) -> None:
        self.__dict__["_text"] = text

    def __getattr__(self, name: str) -> Any:
        refuse(self._text)

    def __iter__(self) -> Any:
        refuse(self._text)

    def __next__(self) -> Any:
        refuse(self._text)


@contextlib.contextmanager
def unused(step: str, names: Sequence[tuple[Name, Any]]) -> Iterator[None]:
    """Keep ``step`` in the block from taking from iterators, drawing from generators, writing to files of these names.

    Args:
        names: and their values.

    Raises:
        CaptureError: it did; generators, and files in memory, are where they were.
    """
    streams = [(name.text, value, state) for name, value in names if (state := state_of(value)) is not None]
    iterators = [(name, value) for name, value in names if is_consumed(value)]
    for name, _ in iterators:
        name.assign(OneShotObject(name.text))
    try:
        yield
    finally:
        for name, value in iterators:
            name.assign(value)
        used = [(text, one, state) for text, one, state in streams if not same_state(state_of(one), state)]
        for _, generator, state in used:
            set_state(generator, state)
    for text, generator, _ in used:
        raise CaptureError(
            f"{step} {use_of(generator, text)}, which a compiled step would do only once. Keep a generator as an attribute of "
            "the module (self.rng), where draws of single numbers are made anew for every step, or draw with torch (torch.rand, "
            "…); use a file in a hook."
        )


@contextlib.contextmanager
def emptied(caches: Sequence[Any]) -> Iterator[None]:
    """Empty the caches of ``functools.cache`` that a capture fills with tensors without values, at its end."""
    _FILLED.append({cache: cache.cache_info().misses for cache in caches})
    try:
        yield
    finally:
        forget_cached()
        _FILLED.pop()


_FILLED: list[dict[Any, int]] = []


def forget_cached() -> None:
    """Empty the caches that a run of a step being captured has filled: another run may begin."""
    for cache, misses in _FILLED[-1].items() if _FILLED else ():
        if cache.cache_info().misses != misses:
            cache.cache_clear()


def keep_cached(cache: Any) -> None:
    """A function that keeps its results was called in a capture, and all that it has computed so far has no tensors in it."""
    if _FILLED and cache in _FILLED[-1]:
        _FILLED[-1][cache] = cache.cache_info().misses
