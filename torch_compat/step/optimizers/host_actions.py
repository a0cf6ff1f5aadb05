"""Host actions of a captured step: schedulers that it steps, options of optimizers that it sets, in its order.

None of this needs values from the device, so it is carried out before the program starts, and its numbers are inputs of the
program: the options of every optimizer step as they are at that point of the step's Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from torch_compat.step.host.host_values import Expression, HostValues
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer


@dataclass(frozen=True)
class HostExpression:
    """A host value of each step: ``of`` computes it, ``text`` tells it from others."""

    of: Expression
    text: str

    @classmethod
    def constant(cls, value: Any) -> HostExpression:
        return cls(lambda host_values: value, repr(value))


class Action(Protocol):
    """A thing that the step does on the host."""

    def run(self, run: PlanRun) -> None: ...

    @property
    def text(self) -> str:
        """Equal for equal actions of two captures."""
        ...


@dataclass
class PlanRun:
    """An execution of a plan.

    Attributes:
        host_values: the step's; actions add to them.
        optimizers: all optimizers of the run.
        hypers: the options of each optimizer step so far.
    """

    host_values: HostValues
    optimizers: tuple[FunctionalOptimizer, ...]
    hypers: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class StepOptimizer:
    """The action ``optimizer.step()``: its options at this moment are the program's."""

    index: int

    def run(self, run: PlanRun) -> None:
        optimizer = run.optimizers[self.index]
        run.hypers.append(optimizer.hyper())
        optimizer.mark_stepped()

    @property
    def text(self) -> str:
        return f"optimizers[{self.index}].step()"


@dataclass(frozen=True)
class StepInline:
    """The action that an optimizer has stepped whose Python ran in the captured step."""

    index: int

    def run(self, run: PlanRun) -> None:
        run.optimizers[self.index].mark_stepped()

    @property
    def text(self) -> str:
        return f"optimizers[{self.index}].step() has run"


@dataclass(frozen=True)
class SetNumber:
    """The action ``optimizer.state[p][…] = value``, a number of the state of an optimizer whose Python ran in the step."""

    numbers: Callable[[], dict[Any, Any]]
    name: str
    key: Any
    value: HostExpression

    def run(self, run: PlanRun) -> None:
        self.numbers()[self.key] = self.value.of(run.host_values)

    @property
    def text(self) -> str:
        return f"{self.name} = {self.value.text}"


@dataclass(frozen=True)
class StepScheduler:
    """The action ``scheduler.step(*args)``; an argument may be an expression over host values."""

    scheduler: Any
    name: str
    args: tuple[HostExpression, ...]
    kwargs: Mapping[str, HostExpression]

    def run(self, run: PlanRun) -> None:
        args = [value.of(run.host_values) for value in self.args]
        self.scheduler.step(*args, **{key: value.of(run.host_values) for key, value in self.kwargs.items()})

    @property
    def text(self) -> str:
        given = [value.text for value in self.args] + [f"{key}={value.text}" for key, value in self.kwargs.items()]
        return f"{self.name}.step({', '.join(given)})"


@dataclass(frozen=True)
class SetOption:
    """The action ``optimizer.param_groups[group][key] = value``; ``groups`` gives the param groups."""

    groups: Callable[[], Sequence[dict[str, Any]]]
    name: str
    group: int
    key: str
    value: HostExpression

    def run(self, run: PlanRun) -> None:
        set_option(self.groups()[self.group], self.key, self.value.of(run.host_values))

    @property
    def text(self) -> str:
        return f"{self.name} = {self.value.text}"


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """``group[key] = value``; a learning rate that is a tensor stays this tensor."""
    old = group.get(key)
    if isinstance(old, torch.Tensor) and not isinstance(value, torch.Tensor):
        old.fill_(value)
    else:
        group[key] = value


@dataclass(frozen=True)
class Read:
    """The action of reading a number that the step changed: kept under another name, since it may change again."""

    name: str
    kept_as: str
    reader: Callable[[], Any]

    def run(self, run: PlanRun) -> None:
        run.host_values.numbers[self.kept_as] = self.reader()

    @property
    def text(self) -> str:
        return f"read {self.kept_as}"


@dataclass
class HostPlan:
    """The actions of a captured step, in order."""

    actions: list[Action] = field(default_factory=list)

    def run(self, host_values: HostValues, optimizers: tuple[FunctionalOptimizer, ...]) -> list[np.ndarray]:
        """Carry them out; gives the options of each optimizer step, in order."""
        run = PlanRun(host_values, optimizers)
        if self.changes_options:
            host_values.numbers.keep()
        for action in self.actions:
            action.run(run)
        return run.hypers

    @property
    def changes_options(self) -> bool:
        """Whether it does more than step optimizers."""
        return any(not isinstance(action, StepOptimizer | StepInline) for action in self.actions)

    def undo(self, optimizers: tuple[FunctionalOptimizer, ...]) -> Callable[[], None]:
        """Remembers what :meth:`run` is about to change; the function that is returned puts it back."""
        holders = [vars(one) for action in self.actions if isinstance(action, StepScheduler) for one in _family(action.scheduler)]
        holders += [holder for one in optimizers for holder in one.host_state()]
        kept = [(holder, {key: _copied(value) for key, value in holder.items()}) for holder in holders]

        def put_back() -> None:
            for holder, before in kept:
                holder.clear()
                holder.update(before)

        return put_back

    def text(self) -> str:
        """Equal for equal plans."""
        return "\n".join(action.text for action in self.actions)


def _family(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it runs (``SequentialLR``, ``ChainedScheduler``)."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _family(inner)


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.clone() if isinstance(value, torch.Tensor) else value
