"""Iterators in attributes of modules from which a step takes batches: a second loader that ``training_step`` pulls by ``next``.

What it takes is taken before the step, on the host, and is an input of its program beside the batch. While the step is captured,
:class:`Given` is in the iterator's place, with traced tensors.
"""

from __future__ import annotations

import gc
import itertools
import traceback
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch

from torch_compat.run.batches import BatchSpec, flatten_batch
from torch_compat.step.effects.recorder import changed_so_far
from torch_compat.step.guards.instrumented import Instrumented
from torch_compat.step.guards.notes import RECEIVER
from torch_compat.step.values.taken_values import TAKEN
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.tensors.live import is_live

_FIX = (
    "Fix: take from it in a hook (on_train_batch_start) or in the dataset; several loaders can be given to the Trainer as a dict "
    "or list."
)
_MOST_REACHED = 100_000
_CLOSED = (type, types.ModuleType, types.CodeType, str, bytes, torch.Tensor)


@dataclass(frozen=True)
class PulledPlace:
    """An attribute with an iterator of which each run of a step takes ``count`` values.

    Attributes:
        attribute: ``(path of the module, name)``.
        owner: the module.
        functions: the functions that may have taken.
    """

    attribute: tuple[str, str]
    count: int
    owner: Any = field(compare=False)
    functions: dict[types.FunctionType, None] = field(compare=False, default_factory=dict)

    def iterator(self) -> Any:
        """The iterator that is there now."""
        return vars(self.owner).get(self.attribute[1])

    def pull(self) -> tuple[list[torch.Tensor], BatchSpec]:
        """Take for the step that begins, unless that has happened; gives the tensors, and what puts them together.

        Raises:
            CaptureError: the iterator is at its end, or raises.
        """
        TAKEN.takers.update(self.functions)
        try:
            values = TAKEN.ahead(self.iterator(), self.count, self._put_back)
        except StopIteration:
            error = CaptureError(f"{self}, from which the step takes, is at its end. {_FIX}")
            error.once = True  # what the step does there, it does not do in the next step
            raise error from None
        except Exception as error:
            raise CaptureError(f"{self}, from which the step takes, raises {type(error).__name__}. {_FIX}") from error
        return flatten_batch(values)

    def more(self) -> PulledPlace:
        """The place of which a step takes one value more."""
        return replace(self, count=self.count + 1)

    def _put_back(self, left: list[Any]) -> None:
        vars(self.owner)[self.attribute[1]] = itertools.chain(left, self.iterator())

    def __str__(self) -> str:
        path, name = self.attribute
        return f"self.{path}.{name}" if path else f"self.{name}"


@runtime_checkable
class Instruments(Protocol):
    """The observer of a step's reads, as far as it is needed here."""

    instrumented: Instrumented


class Given:
    """An iterator of the values that a step takes of ``place``, while it is captured.

    Attributes:
        has_drawn: whether the step has drawn from Python's or NumPy's generator so far.
    """

    def __init__(self, place: PulledPlace, values: list[Any]) -> None:
        self.place, self._values, self.had = place, values, 0
        self.has_drawn: Callable[[], bool] = bool

    def __next__(self) -> Any:
        if self.has_drawn():
            raise self._refusal(", after it has drawn from a random generator, from which the iterator may draw")
        changed = changed_so_far()
        if changed and _reaches(self.place.iterator(), changed):
            raise self._refusal(", after it has changed what the iterator may look at")
        if self.had == len(self._values):
            error, observer = self._refusal(), RECEIVER.observer
            if isinstance(observer, Instruments):  # else nobody knows whom to give it again where the step is eager after all
                more = self.place.more()
                more.functions.update(dict.fromkeys(observer.instrumented.functions))
                error.carried = (more,)
            raise error
        self.had += 1
        return self._values[self.had - 1]

    def __iter__(self) -> NoReturn:
        raise self._refusal(", in a loop")

    def _refusal(self, how: str = "") -> CaptureError:
        where = user_line(traceback.extract_stack()) or "the step"
        error = CaptureError(f"{where}\n  cannot be captured: it takes from {self.place}, an iterator{how}.\n  {_FIX}")
        error.recoverable = self.had == len(self._values)  # else it has been asked for them too early
        return error

    def check(self) -> None:
        """See that all was taken, at the end of the step.

        Raises:
            CaptureError: it was not.
        """
        if self.had < len(self._values):
            raise CaptureError(f"the step takes from {self.place} more or fewer values from batch to batch. {_FIX}")


GIVEN: dict[int, Given] = {}
"""What is in an iterator's place, by its id, while a step is captured."""


def given(place: PulledPlace, has_drawn: Callable[[], bool]) -> Given:
    """The object that stands in the place of an iterator."""
    one = GIVEN.setdefault(id(place.iterator()), Given(place, []))
    one.has_drawn = has_drawn
    return one


def _reaches(value: Any, wanted: Collection[int]) -> bool:
    """Whether one of these objects can be reached from ``value``, or that cannot be told."""
    todo, met = [value], {id(value)}
    while todo:
        one = todo.pop()
        if id(one) in wanted:
            return True
        held = [one.__closure__, one.__defaults__] if isinstance(one, types.FunctionType) else gc.get_referents(one)
        for inner in held:
            if isinstance(inner, torch.Tensor) and is_live(inner):
                return True
            if id(inner) not in met and not isinstance(inner, _CLOSED):
                met.add(id(inner))
                todo.append(inner)
        if len(met) > _MOST_REACHED:
            return True
    return False
