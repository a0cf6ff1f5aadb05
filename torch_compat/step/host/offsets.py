"""Offsets in tensors, which are known before each step and others for each: whole numbers, and what is added to them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Offset = tuple[str, int]
"""A whole number as the text of another, and what is added to that: two with the same text always differ by the same."""


def moved(function: Callable[..., Any], offset: Offset, other: Any, *, swap: bool = False) -> Offset | None:
    """The offset that ``function``, an operator, makes of an offset and a number; None where it adds no constant."""
    if type(other) is not int or function not in (operator.add, operator.sub) or (swap and function is operator.sub):
        return None
    return offset[0], function(offset[1], other)


def offset_of(number: Any) -> Offset | None:
    """The offset that a number of the step, or a value that comes later, is; None where it is none that is known before."""
    return number.as_offset if hasattr(type(number), "as_offset") else None


def width(start: Any, stop: Any) -> int | None:
    """How many there are from ``start`` to ``stop`` where it is the same for every step, and above 0."""
    first, last = offset_of(start), offset_of(stop)
    return last[1] - first[1] if first and last and first[0] == last[0] and last[1] > first[1] else None


@dataclass
class MovingOffsets:
    """How runs of a step take offsets that are no random numbers.

    Attributes:
        exact: each is a constant of its program, so that slices are views, as in torch; else they are inputs.
        met: whether a run has taken one as an input.
    """

    exact: bool = False
    met: bool = False

    def meet(self) -> bool:
        """Whether the run takes one as an input."""
        self.met = self.met or not self.exact
        return not self.exact
