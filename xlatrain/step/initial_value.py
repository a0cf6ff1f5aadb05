"""The initial value of a variable. Imports no flax, which only users of ``nnx`` pay for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class InitialValue:
    """The values of one variable, as a program of no inputs.

    Attributes:
        make: gives them. Pure.
        spec: shape and dtype.
        digest: equal for equal programs, in every process.
        adds_up: whether numbers are added in it, whose order, and so the last bit, partitioning would change.
    """

    make: Callable[[], jax.Array]
    spec: jax.ShapeDtypeStruct
    digest: str
    adds_up: bool
