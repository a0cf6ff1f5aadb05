"""Iterators, generators and files, which give something else each time that they are asked, and caches.

A capture must leave them as they were, and a compiled step would use them only once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import traceback
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from torch_compat.step.values import policy
from torch_compat.step.values.marks import PLAIN
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


_SIMPLE = frozenset(
    (
        *(type(iter(one)) for one in ([], (), "", b"", range(0), range(1 << 70), {}, {}.values(), {}.items(), set(), deque())),
        *(
            type(reversed([])),
            itertools.count,
            itertools.cycle,
            itertools.repeat,
            itertools.chain,
            itertools.islice,
            zip,
            enumerate,
        ),
    )
)
_PURE = frozenset({"abs", "float", "int", "len", "max", "min", "range", "round", "sum"})


def runs_no_code(iterator: Any) -> bool:
    """Whether taking from an iterator runs no code that could see that a step is being captured.

    So it is with Python's own, and with a generator that only computes with its own variables, which are numbers and the like.
    """
    if type(iterator) is types.GeneratorType:
        return _is_closed(iterator)
    if type(iterator) not in _SIMPLE:
        return False
    held = [one for found in gc.get_referents(iterator) for one in (found if type(found) is tuple else (found,))]
    return all(runs_no_code(one) for one in held if hasattr(type(one), "__next__"))


def _is_closed(generator: types.GeneratorType[Any, Any, Any]) -> bool:
    code, frame = generator.gi_code, generator.gi_frame
    if frame is None:
        return True
    names = code.co_names
    if code.co_freevars or not _PURE.issuperset(names) or not frame.f_globals.keys().isdisjoint(names):
        return False
    plain = all(isinstance(one, PLAIN) or type(one) is range or runs_no_code(one) for one in frame.f_locals.values())
    nested = any(isinstance(one, types.CodeType) for one in code.co_consts)
    return plain and not nested and (generator.gi_yieldfrom is None or runs_no_code(generator.gi_yieldfrom))


def holds_consumed(value: Any, depth: int = 0) -> bool:
    """Whether there is one in it: in a container, or an object of the user's."""
    if is_consumed(value):
        if not _TAKING or not runs_no_code(value):
            return True
        _TAKING[-1][id(value)] = value
        return False
    if depth == policy.DEPTH_OF_ITERATORS:
        return False
    held: Any = ()
    if isinstance(value, dict | list | tuple | set | deque):
        held = value.values() if isinstance(value, dict) else value
    elif is_user_object(value):
        held = vars(value).values()
    return len(held) <= policy.FEW and any(holds_consumed(one, depth + 1) for one in tuple(held))


@contextlib.contextmanager
def taking() -> Iterator[None]:
    """Within the block the step may take from iterators that it finds."""
    _TAKING.append({})
    try:
        yield
    finally:
        _TAKING.pop()


_TAKING: list[dict[int, Any]] = []


def is_found(iterator: Any) -> bool:
    """Whether the step has found the iterator in an attribute, and may take from it."""
    return bool(_TAKING) and id(iterator) in _TAKING[-1]


def refuse(text: str) -> NoReturn:
    """Raises:
    CaptureError: always; names the user's line.
    """
    error = CaptureError(
        f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: it uses {text}, an iterator or a mock, "
        "which a compiled step would do only once.\n  Fix: take from it in a hook (on_train_batch_start) or in the dataset; "
        "several loaders can be given to the Trainer as a dict or list."
    )
    error.per_batch = not _TAKING
    raise error


def refuse_kept_in_c(name: str) -> NoReturn:
    """Raises:
    CaptureError: always; names the user's line.
    """
    raise CaptureError(
        f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: it uses a {name}, of which a capture could "
        "not take back what a step changes.\n  Fix: take what the step needs out of it in a hook (on_train_batch_start), as "
        "numbers, tensors or an array."
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
