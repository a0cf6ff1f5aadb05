"""Texts that a captured step says: numbers in what it gives to ``print`` or to a logger are those of each step.

A counter in any other text, which the step's Python may look at, is the same for each step of a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch_compat.step.host.calls import HostCalls

_F = TypeVar("_F", bound=Callable[..., Any])


def recording(function: _F) -> _F:
    """Mark a function that calls of the step are noted by, with all that they are given."""
    function.is_recording = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def is_recording(function: Any) -> bool:
    """Whether it is a function, or a method, marked by :func:`recording`."""
    return getattr(getattr(function, "__func__", function), "is_recording", False)


class Said:
    """A counter in a text that is said after each step.

    Args:
        number: the counter.
        calls: where it is noted how it is formatted.
    """

    def __init__(self, number: Any, calls: HostCalls) -> None:
        self._number = number
        self._calls = calls

    def text_by(self, function: Callable[..., str], *before: Any) -> str:
        """The text that stands for ``function(*before, number)``."""
        return self._calls.text_of(function, *before, self._number)

    def __format__(self, specification: str) -> str:
        return self._calls.text_of(format, self._number, specification)

    def __str__(self) -> str:
        return self.text_by(str)

    def __repr__(self) -> str:
        return self.text_by(repr)


def said(value: Any) -> Any:
    """A counter as it is formatted where the text is said; anything else as it is."""
    to_say = getattr(type(value), "to_say", None)
    return value if to_say is None else to_say(value)
