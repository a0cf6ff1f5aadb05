"""Host numbers that a captured step uses each time that it runs: the loop's counters and others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from torch_compat.step.host.host_values import Expression, HostNumbers, HostValues
from torch_compat.step.host.slots import ValueSlot
from xlatrain.bridge.tensors.constants import contents_of
from xlatrain.bridge.tensors.dtypes import jax_dtype

SLOTS = 16
"""How many expressions of each kind (whole, fractional) a step may use in tensor arithmetic."""


@dataclass(frozen=True)
class Guard:
    """A guard on the host's numbers: the capture is valid where ``expression`` gives ``outcome``."""

    expression: Expression
    outcome: Hashable
    text: str


@dataclass(frozen=True)
class ArrayForm:
    """The shape and dtype of an array that is an input of a step."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ArraysWantedError(BaseException):  # passes a user's `except Exception`
    """A step uses arrays that are no inputs of its run.

    Args:
        forms: of all arrays that it is seen to use.
    """

    def __init__(self, forms: tuple[ArrayForm, ...]) -> None:
        super().__init__(f"a step with {len(forms)} arrays as inputs")
        self.forms = forms


@dataclass(frozen=True)
class Assumption:
    """An outcome of a value that only the running step knows, for which its Python was captured.

    Attributes:
        outcome: a whole number; 0 and 1 for False and True.
        text: what was asked, and where.
        slot: of the host's own answer, where the program cannot always tell.
    """

    outcome: int
    text: str
    slot: ValueSlot | None = None


@dataclass
class ScalarPlan:
    """The uses that a captured step makes of the loop's counters.

    Attributes:
        guards: the guards that select the program.
        asked: values of the batch that select it too.
        assumed: outcomes for which the step was captured, which its program looks at.
        constants: tensors from outside of the step, which these, or the step's Python, depend on.
        wholes, fractions: expressions whose values are inputs, int and float.
        arrays: expressions that give arrays which are inputs, and their forms.
        moved: by how much the step itself advances each counter.
        offsets_exact: whether places that are known before the step are constants (:class:`MovingOffsets`).
        draws: numbers that the step draws from Python's and numpy's random generators; None for none.
    """

    guards: list[Guard] = field(default_factory=list)
    asked: list[Guard] = field(default_factory=list)
    assumed: list[Assumption] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    wholes: list[Expression] = field(default_factory=list)
    fractions: list[Expression] = field(default_factory=list)
    arrays: list[tuple[Expression, ArrayForm]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    offsets_exact: bool = False
    draws: Any = None

    def holds(self, host_values: HostValues) -> bool:
        """Whether the variant is right for these counters."""
        for guard in self.guards:  # a generator costs more than most steps have to look at
            if guard.expression(host_values) != guard.outcome:
                return False
        if self.asked:
            try:
                for guard in self.asked:
                    if guard.expression(host_values) != guard.outcome:
                        return False
            except Exception:  # an op of the user's, which the capture that follows raises where the user wrote it
                return False
        return True

    def branch_on_draws(self, host_values: HostValues) -> bool:
        """Whether a guard depends on a number that the step draws; ``host_values`` has them."""
        noting = _Noting(host_values.numbers)
        for guard in (*self.guards, *(self.asked if self.draws else ())):
            guard.expression(replace(host_values, numbers=noting))
        return bool(self.draws) and not noting.names.isdisjoint(self.draws.names)

    @property
    def read(self) -> str:
        """The assumptions of the capture, in words: two that assumed otherwise are two variants, even if they did the same."""
        texts = [f"{guard.text} is {guard.outcome!r}" for guard in (*self.guards, *self.asked)]
        texts += [f"{one.text} is {one.outcome}" for one in self.assumed]
        texts += [f"a {one.dtype} tensor {tuple(one.shape)} with the values {contents_of(one)}" for one in self.constants]
        return "\n".join([*texts, *(self.draws.texts if self.draws else ())])

    @property
    def outcomes(self) -> list[int]:
        """The outcomes for which the step was captured."""
        return [one.outcome for one in self.assumed]

    @property
    def is_empty(self) -> bool:
        """Whether no counter and no array is used in tensor arithmetic."""
        return not self.wholes and not self.fractions and not self.arrays

    @property
    def array_forms(self) -> tuple[ArrayForm, ...]:
        """The forms of the arrays that are inputs."""
        return tuple(form for _, form in self.arrays)

    def inputs(self, host_values: HostValues) -> tuple[np.ndarray | np.generic, ...]:
        """The program's inputs: int32[SLOTS], float32[SLOTS] (float64 with x64) and arrays; none where none is an input.

        Before them, where outcomes are assumed, how many of these are known: an int32 scalar.
        """
        assumptions = host_values.assumptions if self.assumed else None
        trusted = () if assumptions is None else (np.int32(assumptions.trusted),)
        if self.is_empty:
            return trusted
        wholes, fractions = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, jax_dtype(torch.float64))
        for index, expression in enumerate(self.wholes):
            wholes[index] = expression(host_values)
        for index, expression in enumerate(self.fractions):
            fractions[index] = expression(host_values)
        return (*trusted, wholes, fractions, *(_narrow(expression(host_values), form) for expression, form in self.arrays))


def scalar_inputs(given: Sequence[Any], *, without: bool) -> tuple[Any, ...]:
    """The inputs of a captured graph for the counters.

    Args:
        given: those of :meth:`ScalarPlan.inputs` that are arrays, followed by the graph's other inputs.
        without: no counter is an input (:attr:`ScalarPlan.is_empty`).
    """
    return (np.zeros(SLOTS, np.int32), np.zeros(SLOTS, jax_dtype(torch.float64)), *given) if without else tuple(given)


def _narrow(array: np.ndarray, form: ArrayForm) -> np.ndarray:
    """An array as programs take it, a 64-bit one with half as many bits.

    Raises:
        OverflowError: a whole number does not fit.
        ValueError: it is of another shape.
    """
    if array.shape != form.shape:
        raise ValueError(f"a step got an array {array.shape} where it was captured with {form.shape}")
    narrow = _NARROW.get(array.dtype)
    if narrow is None:
        return array
    if narrow.kind in "iu" and array.size and not np.iinfo(narrow).min <= array.min() <= array.max() <= np.iinfo(narrow).max:
        raise OverflowError(f"a step got whole numbers from {array.min()} to {array.max()}, and programs have {narrow}")
    return array.astype(narrow)


_NARROW = {np.dtype(f"{kind}8"): np.dtype(f"{kind}4") for kind in "iuf"}


class _Noting(HostNumbers):
    """Numbers of a step that note which of them were read."""

    def __init__(self, numbers: HostNumbers) -> None:
        super().__init__({})
        self.names: set[str] = set()
        self._numbers = numbers

    def __missing__(self, name: str) -> Any:
        self.names.add(name)
        return self._numbers[name]
