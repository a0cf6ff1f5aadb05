"""Random generators of Python, numpy and torch, and files, with their positions in their streams."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


def state_of(value: Any) -> Any:
    """The state of a random generator or an open file, which it does not go on to change; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    if isinstance(value, np.random.BitGenerator):
        return copy.deepcopy(value.state)
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, io.StringIO | io.BytesIO):
        return None if value.closed else (value.tell(), value.getvalue())
    if isinstance(value, io.IOBase):
        with contextlib.suppress(OSError, ValueError):  # a terminal, or closed
            return value.tell()
    if not isinstance(value, torch.Generator):
        return None
    with _disable_current_modes():  # a step may be running on fake tensors
        return value.get_state()


def host_random_state() -> tuple[Any, Any]:
    """The states of the generators that Python and numpy have for everybody."""
    return random.getstate(), np.random.get_state()


def same_state(now: Any, before: Any) -> bool:
    """Whether two states of one generator are the same."""
    if isinstance(now, torch.Tensor):
        with _disable_current_modes():
            return torch.equal(now, before)
    if isinstance(now, np.ndarray):
        return np.array_equal(now, before)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(same_state(now[key], before[key]) for key in now)
    if isinstance(now, tuple):
        if {*map(type, now)} == {int}:  # the hundreds of numbers of Python's own generator
            return now == before
        return len(now) == len(before) and all(map(same_state, now, before))
    return now == before


def set_state(generator: Any, state: Any) -> None:
    """Put a generator where :func:`state_of` found it; of files, those in memory: others may write to one on disk."""
    if isinstance(generator, io.IOBase):
        if isinstance(generator, io.StringIO | io.BytesIO):
            position, written = state
            generator.seek(0)
            generator.truncate()
            generator.write(written)
            generator.seek(position)
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    else:
        generator.set_state(state)


@contextlib.contextmanager
def torch_generator_kept() -> Iterator[None]:
    """Leave torch's generator as the block finds it, in a capture too, where ``fork_rng`` is about the program's draws."""
    before = state_of(torch.default_generator)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def use_of(generator: Any, text: str) -> str:
    """A description of the use of a generator or file that has moved on, as the end of a sentence; ``text`` is its name."""
    return f"writes to the file {text}" if isinstance(generator, io.IOBase) else f"draws from the random generator {text}"
