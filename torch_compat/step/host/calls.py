"""Calls that a step's Python makes and that need values: recorded while the step is captured, made on the host after each step.

A torchmetrics update, ``print(loss)``, ``logger.experiment.add_scalar("x", t, step)`` or ``loss.item()`` need no tracing. While a
step is captured they are recorded with their arguments, whose traced tensors become outputs of the program; what they return
is a :class:`~torch_compat.step.host.host_future.HostFuture` value. After each executed step they are made, in order, on real
values.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_compat.step.host.host_memory import HostMemory
from torch_compat.step.host.later_text import END, MARK, RECORDER, LaterText, later_text
from torch_compat.step.host.slots import ComputedSlot, ValueSlot
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.cluster.distributed import world

if TYPE_CHECKING:
    from torch_compat.step.host.batch_values import AskedValues

_Part = str | tuple[ValueSlot, str | None]
"""A part of a text: constant, or a slot and the format specification of its value."""


def _joined(parts: Sequence[_Part], results: Sequence[Any]) -> str:
    return "".join(part if isinstance(part, str) else _formatted(part[0].find(results), part[1]) for part in parts)


def _formatted(value: Any, specification: str | None) -> str:
    return str(value) if specification is None else format(value, specification)


@dataclass(frozen=True)
class HostCall:
    """A recorded call.

    Attributes:
        function, args, kwargs: the call, with slots in the arguments for values that differ from step to step.
        text: a description that tells the call from other calls.
        where: the user's ``file:line: source``.
        state: objects that only the call changes, so that it may be late for as long as nobody looks at them; None where the call
            has other effects and must be made at once.
    """

    function: Callable[..., Any] = field(compare=False)
    args: Any
    kwargs: Any
    text: str
    where: str | None
    state: tuple[Any, ...] | None = field(default=None, compare=False)

    def make(self, fill: Callable[[Any], Any]) -> Any:
        """Make the call on real values; an exception says where the user wrote it."""
        args, kwargs = fill((self.args, self.kwargs))
        try:
            return self.function(*args, **kwargs)
        except Exception as error:
            error.add_note(f"This call of a compiled step is made on the host after the step: {self.where or self.text}")
            raise


_NOTHING = HostCall(lambda: None, (), {}, "nothing", None, ())
"""In the place of a call whose result nobody wants."""


class UnhashableError(CaptureError, TypeError):
    """A number that only the running step knows is asked for its hash."""


@dataclass
class HostCalls:
    """Records the host calls of one capture.

    Attributes:
        calls: the calls recorded so far.
        refused: the first error of a use that was refused.
        closed: whether the capture is over.
        used: indices of the calls whose results are used.
        pure: indices of the calls that are made for their results only.
        read: indices of the calls whose results the graph uses as tensors.
        likes: arrays of the shape and type of some results, by the indices of the calls.
        asked: gives values that are known before the step.
        memory: the memory that tensors and arrays share.
    """

    calls: list[HostCall] = field(default_factory=list)
    refused: CaptureError | None = None
    closed: bool = False
    used: set[int] = field(default_factory=set)
    pure: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    likes: dict[int, Any] = field(default_factory=dict)
    asked: AskedValues | None = None
    memory: HostMemory = field(default_factory=HostMemory)
    _texts: list[tuple[ValueSlot, str | None]] = field(default_factory=list)
    _used_texts: set[int] = field(default_factory=set)
    _may_be_dropped: set[int] = field(default_factory=set)
    _put_together: set[int] = field(default_factory=set)
    _given: set[int] = field(default_factory=set)

    def record(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        text: str,
        state: tuple[Any, ...] | None = (),
        pure: bool = False,
    ) -> ValueSlot:
        """Note a call; ``state`` as in :class:`HostCall`, by default none at all; ``pure``: it is made for its result only."""
        if pure:
            self.pure.add(len(self.calls))
        args, kwargs = snapshot(self.taking_rows((tuple(args), dict(kwargs or {}))))
        where = user_line(traceback.extract_stack())
        self.calls.append(HostCall(function, args, kwargs, text, where, state))
        return ValueSlot("results", len(self.calls) - 1)

    def taking_rows(self, tree: Any) -> Any:
        """``tree`` with what a mask selects (``x[mask]``) taken out of all rows on the host: no size of the program."""

        def of(leaf: Any) -> Any:
            if type(leaf) is not MaskedRows:
                return leaf
            if world().process_count > 1:  # which rows are whose
                return leaf.exact()
            slot = self.record(_selected, (leaf.rows, leaf.valid, leaf.axis), text="x[mask]")
            self.used.add(slot.index)
            return slot

        return pytree.tree_map(of, tree, is_leaf=is_size)

    def refuse(self, reason: str, fix: str, where: str | None = None) -> CaptureError:
        """The error for a use of a value that does not exist yet; it ends the capture even if the user's code catches it."""
        where = where or user_line(traceback.extract_stack()) or "the step"
        error = CaptureError(f"{where}\n  cannot be captured: {reason}.\n  Fix: {fix}.")
        self.refused = self.refused or error
        return error

    def unhashable(self, reason: str, fix: str) -> UnhashableError:
        """The error for a value that does not exist yet as a key of a dict; code that expects keys like that may catch it."""
        where = user_line(traceback.extract_stack()) or "the step"
        return UnhashableError(f"{where}\n  cannot be captured: {reason}.\n  Fix: {fix}.")

    def marker(self, slot: ValueSlot, specification: str | None, *, may_be_dropped: bool = False) -> str:
        """A text that stands for a formatted value until it reaches a call, a container or a result.

        Args:
            may_be_dropped: also where it reaches none, nobody has looked at it.
        """
        self._texts.append((slot, specification))
        if may_be_dropped:
            self._may_be_dropped.add(len(self._texts) - 1)
        text = f"{MARK}{len(self._texts) - 1}{END}"
        RECORDER.set(self)
        return text if may_be_dropped else later_text(text)

    def text_of(self, function: Callable[..., str], *args: Any) -> str:
        """The text that stands for ``function(*args)``, which changes nothing."""
        text = self.marker(self.record(function, args, text=function.__name__, pure=True), None)
        if all(self._is_put_together(arg) for arg in args if type(arg) is LaterText):
            self.note_put_together(text)
        return text

    def note_put_together(self, text: str) -> None:
        """See :class:`~torch_compat.step.host.later_text.Recorder`."""
        self._put_together.update(_numbers(text))

    def note_given(self, text: str) -> None:
        """See :class:`~torch_compat.step.host.later_text.Recorder`."""
        self._given.update(_numbers(text))

    def _is_put_together(self, text: LaterText) -> bool:
        return _numbers(text) <= self._put_together - self._given

    def text_slot(self, text: str) -> ComputedSlot | str:
        """A slot for ``text``, if values were formatted into it, else ``text``."""
        text = str.__str__(text)
        if MARK not in text:
            return text
        head, *others = text.split(MARK)
        parts: list[_Part] = [head] if head else []
        for other in others:
            number, _, rest = other.partition(END)
            self._used_texts.add(int(number))
            self.used.add(self._texts[int(number)][0].index)
            parts += [self._texts[int(number)], *([rest] if rest else [])]
        return ComputedSlot("results", functools.partial(_joined, parts), repr(parts))

    def finish(self, template: Callable[[Any], Any]) -> tuple[HostCall, ...]:
        """The calls, with ``template`` applied to their arguments; to be called when everything else has its places.

        Raises:
            CaptureError: a value was used in a way that was refused.
        """
        self.check_refused()
        made: list[HostCall] = []
        for index, call in reversed(list(enumerate(self.calls))):  # what a later call takes is used
            if index in self.pure and index not in self.used:
                made.append(_NOTHING)
                continue
            args, kwargs = template((call.args, call.kwargs))
            made.append(HostCall(call.function, args, kwargs, call.text, call.where, call.state))
        return () if all(call is _NOTHING for call in made) else tuple(reversed(made))

    def check_refused(self) -> None:
        """Raises:
        CaptureError: a value was used in a way that was refused.
        """
        if self.refused is not None:
            raise self.refused

    def check_texts(self) -> None:
        """To be called when everything that may hold a text was turned into slots.

        Raises:
            CaptureError: a text with a value in it was neither passed to a call nor kept, so that the step's Python must have
                looked at it: unless followed code alone has had it, where looks are told.
        """
        may_be_dropped = self._may_be_dropped | (self._put_together - self._given)
        if len(self._used_texts | may_be_dropped) < len(self._texts):
            raise CaptureError(
                "the step cannot be captured: it formats the value of a tensor into a text and then uses the text otherwise "
                "than by printing, logging, storing or returning it.\n  Fix: format values in a hook such as on_train_batch_end."
            )


def _numbers(text: str) -> set[int]:
    """The numbers of the values in a text with marks."""
    return {int(part.partition(END)[0]) for part in str.__str__(text).split(MARK)[1:]}


def _selected(rows: torch.Tensor, valid: torch.Tensor, axis: int) -> torch.Tensor:
    return rows[(*[slice(None)] * axis, valid)]


def is_traced(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor of the step that is being captured."""
    kind = type(leaf)  # not isinstance: a deferred value passes for what it will be
    return issubclass(kind, FunctionalTensor | FakeTensor) or (issubclass(kind, torch.Tensor) and hasattr(leaf, "_live"))


def is_size(node: Any) -> bool:
    """A shape stays a ``torch.Size``: torch's trees take it for a tuple."""
    return type(node) is torch.Size


def snapshot(tree: Any) -> Any:
    """``tree`` with its traced tensors as they are now: they may be changed in place later. Containers are copied too."""

    def of(leaf: Any) -> Any:
        return leaf.detach().clone() if is_traced(leaf) else leaf

    return pytree.tree_map(of, tree, is_leaf=is_size)
