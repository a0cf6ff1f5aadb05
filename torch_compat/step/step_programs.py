"""The programs of one step of a module, and which of them a batch needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch_compat.step.capture.cached_program import CachedProgram
from torch_compat.step.capture.session import ImpureStepError
from torch_compat.step.effects.effects import ObjectPath
from torch_compat.step.host.host_values import HostValues

_MAX_PROGRAMS = 64
_MAX_ASKED = 16  # programs for values for which the step's Python asks, if few of them come again
_MAX_PADDED = 256  # sizes whose captures are kept, of those that share a program
_FORGETS = 0.8  # what followed the same outcomes before counts for less each time: outcomes change in the course of a training

Key = tuple[Hashable, Hashable]
"""What the caller says of the program, and what guards say that selects it."""


class Surroundings(NamedTuple):
    """The surroundings of a step as it begins, of which a change may make no difference to it.

    Attributes:
        state: the number of the state of what it reads outside of the module.
        comparable: whether a run in this state and one in another show all that differs.
        outline: of the containers on whose contents its effects may depend.
        changed: name → object that steps may change.
    """

    state: int
    comparable: Callable[[int], bool]
    outline: tuple[Hashable, ...]
    changed: Mapping[str, Any]


@dataclass(frozen=True)
class Doubt:
    """A program that is the one for a batch if another run of the step's Python does the same; no other is certain to be.

    Attributes:
        program: that is in doubt.
        answers: where it is noted what such a run did; None: the program shall be audited.
        about: the state, or the outline, in which it has not been seen.
    """

    program: CachedProgram
    answers: dict[Any, bool] | None = None
    about: Any = None

    @property
    def is_audit(self) -> bool:
        """Whether the program shall be audited, as it is now and then."""
        return self.answers is None

    @property
    def is_of_state(self) -> bool:
        """Whether something has changed outside of the module."""
        return self.answers is self.program.states


class StepPrograms:
    """The programs of one step.

    Args:
        name: of the step.

    Attributes:
        deciding: containers on whose contents its effects may depend.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.deciding: dict[ObjectPath, None] = {}
        self._programs: dict[Key, list[CachedProgram]] = {}
        self._padded: deque[CachedProgram] = deque()
        self._held: CachedProgram | None = None  # whose outcomes were those of the last batch
        self._holds = 0

    def __iter__(self) -> Iterator[CachedProgram]:
        for programs in self._programs.values():
            yield from programs

    def of(self, key: Key) -> Collection[CachedProgram]:
        """The programs for a key."""
        return self._programs.get(key, ())

    def of_caller(self, fixed: Hashable) -> list[CachedProgram]:
        """The programs for what the caller says, whatever selects among them."""
        return [one for key, programs in self._programs.items() if key[0] == fixed for one in programs]

    def answered(self, key: Key, state: int) -> int:
        """How many programs for a key have an answer to whether the step does the same in a state."""
        return sum(state in one.states for one in self.of(key))

    def add(self, key: Key, program: CachedProgram) -> None:
        """Keep a program; of those that share one the capture of long ago is let go, since another capture finds it again."""
        self._programs.setdefault(key, []).append(program)
        if program.padding is not None:
            self._padded.append(program)
            if len(self._padded) > _MAX_PADDED:
                self.drop(self._padded.popleft())

    def drop(self, program: CachedProgram) -> None:
        """Let go of a program."""
        for programs in self._programs.values():
            if program in programs:
                programs.remove(program)

    def find(self, key: Key, host_values: HostValues, around: Surroundings) -> CachedProgram | Doubt | None:
        """The program for a key and host values, or the one that may be; None where none is. This changes nothing."""
        assumptions, doubt = host_values.assumptions, None
        for program in self._likeliest_first(self.of(key)):
            if assumptions is not None and not assumptions.agree(program.step.scalars.outcomes):
                continue
            same = program.states.get(around.state)
            if same is False or not program.fits(host_values, around.changed):
                continue
            if same is None:
                if doubt is None and any(around.comparable(state) for state, like in program.states.items() if like):
                    doubt = Doubt(program, program.states, around.state)
                continue
            if self.deciding:
                same = program.outlines.get(around.outline)
                if same is None:
                    return Doubt(program, program.outlines, around.outline)
                if not same:
                    continue
            return Doubt(program) if program.is_due else program
        return doubt

    def _likeliest_first(self, programs: Collection[CachedProgram]) -> Collection[CachedProgram]:
        """Programs in the order of trying: of those made for outcomes first what mostly came after the same, then the latest."""
        if len(programs) < 2 or not any(one.step.scalars.assumed for one in programs):
            return programs
        followed = {} if self._held is None else self._held.followed
        return sorted(programs, key=lambda one: (followed.get(one, 0.0), one.held_at), reverse=True)

    def note_held(self, program: CachedProgram) -> None:
        """Note that the outcomes of a step were those for which this program was made."""
        if (last := self._held) is not None:
            last.followed = {one: count * _FORGETS for one, count in last.followed.items()}
            last.followed[program] = last.followed.get(program, 0.0) + 1
        self._holds += 1
        program.held_at, self._held = self._holds, program

    def check_number(self, recompilations: Collection[str]) -> None:
        """Refuse a step that needs too many programs.

        Args:
            recompilations: why there were some in this run.

        Raises:
            ImpureStepError: it does, or it asks for values of which few have come again.
        """
        own = [one for one in self if one.padding is None]
        asking = [one for one in own if one.step.scalars.asked or one.step.scalars.assumed]
        if len(asking) > _MAX_ASKED and sum(one.runs for one in asking) < 2 * len(asking):
            asked = asking[-1].step.scalars
            texts = dict.fromkeys(one.text for one in (*asked.asked, *asked.assumed))
            raise ImpureStepError(
                f"{self.name} asks for too many different values: it was compiled for {len(asking)} of them, and "
                f"few have come again. It asks for {'; '.join(list(texts)[:3])}\n  Fix: compute with tensors of fixed sizes "
                "(torch.where), let x[mask] end in a sum, a mean or a loss, or pad batches so that sizes come again "
                "(torch_compat.utilities.padding)"
            )
        if len(own) > _MAX_PROGRAMS:
            raise ImpureStepError(
                f"{self.name} needed more than {_MAX_PROGRAMS} compiled variants; lately because of {list(recompilations)[-1]}. "
                "A host value that the step reads changes all the time, or the batches' shapes do: pad the batches to few "
                "lengths (torch_compat.utilities.padding), and keep changing values in tensors or in plain number attributes."
            )
