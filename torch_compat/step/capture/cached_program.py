"""A cached program: a captured and compiled form of a step, and the key that decides about it besides its guards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.placed_batch import PlacedBatch
from xlatrain.bridge.host_draws import HostDraws
from xlatrain.bridge.tensors.constants import BakedTensor
from xlatrain.host.malloc import Block
from xlatrain.step.stacking import Stacking


class StepName(str):
    """The name of a step of an object that steps have besides the methods of a run's one module: two of one text are two steps.

    Programs and guards are kept by it, so that they belong to the object that holds it; its text is for people.

    Args:
        text: what messages call the step.
        method: the name of the method with which its code begins, or "".
    """

    def __new__(cls, text: str, method: str = "") -> StepName:
        made = super().__new__(cls, text)
        made.method = method
        return made

    method: str

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__


AUDITED_RUNS = frozenset({1, 16, 128, 1024, 8192, 65536})
"""Numbers of runs before which a form's Python runs once more, to see whether it still does the same."""


class NamedStatic(tuple[tuple[str, Hashable], ...]):
    """The rest of a program's key: pairs of a name that the user knows and a value."""

    __slots__ = ()

    def joined(self, others: tuple[Hashable, ...]) -> Hashable:
        """The key joined with other values that have the usual names of a training step."""
        return (*others, self) if self else others


NO_FACTS = NamedStatic()


class Built(NamedTuple):
    """A program of a captured step.

    Attributes:
        program: the jitted function.
        compiled: whether an earlier run of the module has compiled it.
        stacking: the parameters that it takes stacked; None for none.
    """

    program: Callable[..., Any]
    compiled: bool = False
    stacking: Stacking | None = None


Build = Callable[[CapturedStep, PlacedBatch], Built]


class BatchPadding(Protocol):
    """How a program takes batches that are smaller than its own."""

    @property
    def step(self) -> CapturedStep:
        """The step that the program is of."""
        ...

    def arrays(self, batch: PlacedBatch, /) -> list[Any]: ...


@dataclass(eq=False)
class CachedProgram:
    """A captured and compiled form of a step.

    Attributes:
        step: the captured step.
        program: the jitted function.
        runs: how often it has run.
        second: whether it replaced a program of the step's first run, which does something once only (it makes a list, say).
        audited: after how many runs its Python has last done the same once more.
        constants: tensors from outside of the step whose values are part of the graph.
        rebound: ``(owner, attribute)`` of what the step assigns anew.
        states: state of what the step reads outside of the module → whether its Python does the same in it.
        outlines: outline of the containers that the step depends on → whether its Python does the same with them.
        branches_on_draws: whether a guard depends on the step's random draws, so that it holds or not only after them.
        compiled, stacking: see :class:`Built`.
        is_checked: whether it was seen before its first run that it can be lowered.
        padding: how it takes the batch, where its program is that of a bucket.
        block: of its temporaries, where it is kept from run to run.
        outdated: whether tensors of ``constants`` have other values now.
        held_at: when its outcomes were last the true ones; 0: never.
        taken_over: whether it is of an earlier run, and this one has not used it yet.
        followed: by the program whose outcomes were those of the next step, how often, of late more than long ago.
    """

    step: CapturedStep
    program: Callable[..., Any]
    runs: int = 0
    second: bool = False
    audited: int = 0
    constants: list[BakedTensor] = field(default_factory=list)
    rebound: frozenset[tuple[str, str]] = frozenset()
    states: dict[int, bool] = field(default_factory=dict)
    outlines: dict[Hashable, bool] = field(default_factory=dict)
    branches_on_draws: bool = False
    compiled: bool = False
    stacking: Stacking | None = None
    is_checked: bool = False
    padding: BatchPadding | None = None
    block: Block | None = None
    outdated: bool = False
    held_at: int = 0
    taken_over: bool = False
    followed: dict[CachedProgram, float] = field(default_factory=dict, repr=False)

    def arrays(self, batch: PlacedBatch) -> list[Any]:
        """A batch as its program takes it."""
        return batch.arrays if self.padding is None else self.padding.arrays(batch)

    @property
    def is_due(self) -> bool:
        """Whether its Python shall run once more before its next run; not again where it has in an earlier run of the module."""
        return self.runs in AUDITED_RUNS and self.runs > max(self.audited, self.step.audited)

    def changes(self, root: str) -> bool:
        """Whether it changes something below this root."""
        return any(record.place.root == root for record in self.step.effects.records)

    def note_audited(self) -> None:
        """Note that its Python did the same for another batch."""
        self.audited = self.runs
        if self.step.kept is not None:
            self.step.kept.note_audited((self.step.text, self.step.reads), self.runs)

    def draw(self, host_values: HostValues) -> None:
        """Make the random draws of the step, so that they can be taken back where something else may have to run for them."""
        draws = self.step.scalars.draws
        host_values.take_back = None
        if draws:
            host_values.take_back = (draws.try_out if self.may_be_taken_back else draws.make)(host_values)

    def scalars(self, host_values: HostValues) -> tuple[Any, ...]:
        """The host's numbers as its program takes them, among them those that torch draws now."""
        given, host_draws = self.step.scalars.inputs(host_values), self._host_draws
        if host_draws is None:
            return given
        if self.may_be_taken_back:
            host_values.take_back_too(functools.partial(torch.set_rng_state, torch.get_rng_state()))
        true = self.step.capture.host_draws
        assert true is not None
        place = 1 if self.step.scalars.assumed else 0
        return (*given[:place], host_draws.make(true, host_values.drawn), *given[place:])

    @functools.cached_property
    def _host_draws(self) -> HostDraws | None:
        """The draws that are inputs of its program."""
        return (self.step if self.padding is None else self.padding.step).capture.host_draws

    @property
    def may_be_taken_back(self) -> bool:
        """Whether something else may have to run for the draws that are made for it."""
        return bool(self.step.scalars.assumed) or self.runs == 0

    def rescan(self) -> None:
        """Compare the tensors in the graph, as a pass over batches begins: they may have changed since the last pass."""
        self.outdated = self.outdated or not all(tensor.is_whole() for tensor in self.constants)

    def fits(self, host_values: HostValues, changed: Mapping[str, Any]) -> bool:
        """Whether the host is as the capture assumed: counters, tensors in the graph, containers that the step fills.

        Draws on which that depends are tried out.
        """
        if self.branches_on_draws:
            take_back = self.step.scalars.draws.try_out(host_values)
            try:
                return self._fits(host_values, changed)
            finally:
                take_back()
        return self._fits(host_values, changed)

    def _fits(self, host_values: HostValues, changed: Mapping[str, Any]) -> bool:
        if self.outdated:
            return False
        for tensor in self.constants:
            if not tensor.is_unchanged():
                return False
        if self.step.effects.assume and not self.step.effects.fit(changed):
            return False
        return self.step.scalars.holds(host_values)
