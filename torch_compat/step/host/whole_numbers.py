"""Whole numbers that a step computes of its tensors' values: Python's have no end, those of a graph 32 bits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

NARROW = 2.0**31
"""No whole number that a tensor tells is larger."""
SAFE = 2.0**30  # fractions below it are near enough for the number itself to have 32 bits
_SUMS = 2.0**36  # sums of larger numbers may be small ones that fractions do not tell
_POWERS = 64

FUNCTIONS = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.pow,
    operator.neg,
    operator.pos,
    abs,
    operator.floordiv,
    operator.mod,
)
"""Functions of whole numbers that give whole numbers."""


OF_RIGHT_ONES = (abs, operator.floordiv, operator.mod)
"""Those that need operands for which the graph has bits enough."""


def bound_of(function: Callable[..., Any], bounds: Sequence[float]) -> float | None:
    """Number that no result of ``function`` is larger than, or None where a graph cannot tell the result.

    What is computed by sums, differences and products is right in the graph but for multiples of 2**32, and known as a fraction
    besides; what is not needs operands that are right.

    Args:
        bounds: of its operands.
    """
    if function in (operator.add, operator.sub):
        return total if (total := sum(bounds)) <= _SUMS else None
    if function is operator.mul:
        return bounds[0] * bounds[1]
    if function is operator.pow:
        return max(bounds[0], 1.0) ** min(bounds[1], _POWERS) if bounds[1] <= _POWERS else None
    if function in (operator.neg, operator.pos):
        return bounds[0]
    return bounds[0] if max(bounds) <= NARROW else None
