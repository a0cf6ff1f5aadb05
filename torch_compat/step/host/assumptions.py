"""Outcomes of values that only the running step knows (``if torch.isnan(loss)``), for which its Python is captured.

Python that asks for such a value gets a guess. The program gives what came out, and takes nothing over where the guess was wrong
(:mod:`xlatrain.step.assumed`): the host then runs another program, captured for the true outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from torch_compat.step.host.calls import HostCall
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.scalar_plan import Assumption
from torch_compat.step.host.slots import ValueSlot
from xlatrain.bridge.capture.cut import UnknownValueError
from xlatrain.step.assumed import UNDECIDED

MOST = 64
"""Outcomes of one step; a loop that asks for more of them seems to have no end."""
_NEAR = 2.0**-20  # numbers that differ by less may compare otherwise in double precision, as Python compares
_TRIES = 16


@dataclass
class Assumptions:
    """The outcomes of one step, as far as they are known or guessed.

    Attributes:
        known: the first ones, as programs have found them for this state and this batch.
        asked: the outcomes that the capture which is going on, or was last, has got.
        other: by position, the opposite of a guess with which a capture came to nothing.
        forced: the outcomes to go through with, as another run did; None: those that are known, then guesses.
    """

    known: list[int] = field(default_factory=list)
    asked: list[tuple[int, bool]] = field(default_factory=list)
    other: dict[int, int] = field(default_factory=dict)
    forced: Sequence[int] | None = None
    _turns: int = 0

    @property
    def trusted(self) -> int:
        """How many outcomes the program need not find."""
        return len(self.known)

    def begin(self) -> None:
        """A capture begins."""
        self.asked = []

    def next(self, like: bool | int) -> int:
        """The outcome for the next question of the capture, whose answer is of the type of ``like``: a whole number is guessed.

        Raises:
            UnknownValueError: too many questions.
        """
        place, forced = len(self.asked), self.forced
        if place == MOST:
            raise UnknownValueError("the step asks for too many values")
        if forced is not None:
            outcome = forced[place] if place < len(forced) else 0
        elif place < len(self.known):
            outcome = self.known[place]
        else:
            outcome = self.other.get(place, int(like))
        self.asked.append((outcome, isinstance(like, bool)))
        return outcome

    def turn(self) -> bool:
        """Guess otherwise in the next capture, since this one came to nothing: False where all that may help was tried."""
        self._turns += 1
        for place in range(len(self.asked) - 1, len(self.known) - 1, -1):
            outcome, is_bool = self.asked[place]
            if is_bool and place not in self.other and self._turns < _TRIES:
                self.other = {at: other for at, other in self.other.items() if at < place}
                self.other[place] = 1 - outcome
                return True
        self.other, self._turns = {}, 0
        return False

    def agree(self, outcomes: Sequence[int]) -> bool:
        """Whether a program made for ``outcomes`` may be the one for this step."""
        return all(known == outcome for known, outcome in zip(self.known, outcomes, strict=False))


@dataclass(frozen=True)
class Compared:
    """Two traced numbers that a Python comparison compares, in double precision; or one of which ``int`` leaves the fraction out.

    Attributes:
        left, right: 0-d tensors, of one number itself and the nearest whole one; one of two may be a Python number.
        slot: of the host's own answer.
    """

    left: torch.Tensor | float
    right: torch.Tensor | float
    slot: ValueSlot

    def near(self) -> torch.Tensor:
        """A bool 0-d tensor: whether they are so near to each other that their own precision cannot tell."""
        left, right = (one.to(torch.float32) if isinstance(one, torch.Tensor) else one for one in (self.left, self.right))
        bound: Any = (abs(left) + abs(right)) * _NEAR
        return (abs(left - right) < bound) & torch.isfinite(bound)


class AssumedValues:
    """The outcomes with which one capture goes on.

    Args:
        assumed: the plan's, to which they are added.
        host_values: of the capture.

    Attributes:
        traced: int32 0-d tensors of the graph that give the outcomes of each step.
    """

    def __init__(self, assumed: list[Assumption], host_values: HostValues) -> None:
        self._assumed = assumed
        self._assumptions = host_values.assumptions
        self.traced: list[torch.Tensor] = []
        if self._assumptions is not None:
            self._assumptions.begin()

    def outcome(
        self,
        value: torch.Tensor,
        text: str,
        found: torch.Tensor | None = None,
        compared: Compared | None = None,
        likely: int | None = None,
    ) -> bool | int:
        """The outcome of a traced bool or whole number, a tensor of one element.

        Args:
            text: where it was asked for.
            found: it as an int32 scalar; None: made here.
            compared: how it came about, where the host may have to tell.
            likely: the first guess, of a whole number; None: 1.

        Raises:
            UnknownValueError: steps of this kind are not captured for outcomes, or it is a fraction.
        """
        assumptions = self._assumptions
        if assumptions is None:
            raise UnknownValueError("this call is not captured for outcomes")
        if value.is_floating_point() or value.is_complex():
            raise UnknownValueError("a fraction differs in each step")
        is_bool = value.dtype == torch.bool
        if found is None:
            with torch.no_grad():
                found = value.detach().reshape(()).to(torch.int32, copy=True)
                if compared is not None:
                    found = torch.where(compared.near(), UNDECIDED, found)
        outcome = assumptions.next(False if is_bool else 1 if likely is None else likely)
        self.traced.append(found)
        self._assumed.append(Assumption(outcome, text, None if compared is None else compared.slot))
        return bool(outcome) if is_bool else outcome


def decide(assumption: Assumption, calls: Sequence[HostCall], fill: Any) -> int:
    """The outcome of a comparison, or a whole number, as the host finds it of the values that the program gave.

    Args:
        fill: puts real values into recorded arguments (:class:`~torch_compat.step.outcome.Filler`).
    """
    assert assumption.slot is not None
    made: dict[int, Any] = {}

    def result(slot: ValueSlot) -> Any:
        if slot.source != "results":
            return fill(slot)
        if slot.index not in made:
            call = calls[slot.index]
            args, kwargs = tree_map_only(ValueSlot, result, (call.args, call.kwargs))
            made[slot.index] = call.function(*fill(args), **fill(kwargs))
        return ValueSlot("results", 0, slot.path).find([made[slot.index]])

    found = result(assumption.slot)
    return found if type(found) is int else int(bool(found))
