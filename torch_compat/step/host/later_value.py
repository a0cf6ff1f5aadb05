"""The result of a host call before it exists: where it will be, what is known of it already, and how the graph has it.

What needs it at once, a branch above all, is refused with the user's file and line; unless it is known before the step, as what
depends on the batch alone: then what the branch saw is a guard.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.array_forms import changes_nothing, form_of
from torch_compat.step.host.assumptions import Compared
from torch_compat.step.host.calls import HostCall, HostCalls
from torch_compat.step.host.host_memory import may_view
from torch_compat.step.host.known import Known
from torch_compat.step.host.offsets import Offset
from torch_compat.step.host.scalar_plan import Expression
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.host.slots import ValueSlot
from torch_compat.step.host.whole_numbers import NARROW, SAFE
from xlatrain.bridge.capture.cut import UnknownValueError
from xlatrain.bridge.errors import is_user_file

WHOLE = 2**31 - 128  # fractions below it have a whole number of 32 bits
_NOT_WHOLE = -WHOLE
_FIX = (
    "use the value in a hook such as on_train_batch_end, or compute with tensors (torch.where instead of if); values may be "
    "logged, printed, stored and returned in the step"
)


PURE = frozenset(
    {
        *("all", "any", "argmax", "argmin", "argsort", "astype", "copy", "count", "cumsum", "flatten", "index", "item", "max"),
        *("mean", "min", "nonzero", "prod", "ravel", "repeat", "reshape", "round", "squeeze", "std", "sum", "T", "tolist"),
        *("transpose", "var"),
    }
)
"""Methods and attributes of numbers, lists and arrays that change nothing."""
_COPIES = ("tolist", "copy")


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function`` of the arguments: what a call of a value that comes after the step is a function of."""
    return function(*args, **kwargs)


class LaterValue:
    """A value that comes after the step.

    Args:
        calls: the recorder.
        slot: which result.
        traced: the same value as a 0-d tensor of the graph, if it is one: what tensor arithmetic uses; or the function that
            computes it, where somebody wants it.
        like: any value of the same type and shape, where they are known: answers ``isinstance``, ``shape`` and ``len``.
        known: where it is known before the step.
        compared: the traced numbers whose comparison it is.
        later: computes the same value in the graph, where the step computes with it; None from it: that cannot be.
    """

    __slots__ = ("_calls", "_compared", "_computes", "_counts", "_known", "_later", "_like", "_made", "_slot", "_top", "_whole")
    comes_after_the_step = True

    def __init__(
        self,
        calls: HostCalls,
        slot: ValueSlot,
        traced: torch.Tensor | Callable[[], torch.Tensor] | None = None,
        like: Any = None,
        known: Known | None = None,
        compared: Compared | None = None,
        later: Callable[[], Any] | None = None,
    ) -> None:
        self._calls = calls
        self._compared = compared
        self._known = known
        self._slot = slot
        self._made, self._computes = (traced, None) if isinstance(traced, torch.Tensor) else (None, traced)
        self._like = like
        self._later = later
        self._counts = False
        self._whole: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._top = NARROW  # no larger it is, where it is a whole number

    def slot(self) -> ValueSlot:
        """The slot of the value; from now on it counts as used."""
        self._calls.used.add(self._slot.index)
        return self._slot

    def may_be_array(self) -> bool:
        """Whether the value is an array, as far as that is known."""
        return self._like is None or isinstance(self._like, np.ndarray)

    @property
    def _traced(self) -> torch.Tensor | None:
        if self._computes is not None:
            self._made, self._computes = self._computes(), None
        return self._made

    def tensor(self, *, made: bool = False) -> torch.Tensor | None:
        """The value as a traced tensor, if there is one; ``made``: if it has been computed. Comparisons are the host's."""
        return None if self._compared else self._made if made else self._traced

    def is_wide(self) -> bool:
        """Whether it is a whole number that was computed, for which the graph may not have bits enough."""
        return self._whole is not None

    def fraction(self) -> torch.Tensor:
        """The number in the graph; one that may not have bits enough there as a fraction, which is as large as in Python."""
        assert self._traced is not None
        if self._whole is None:
            return self._traced
        large = self._large()
        return torch.where(large.abs() < SAFE, self._traced.to(large.dtype), large)

    def _large(self) -> torch.Tensor:
        if self._whole is None:
            assert self._traced is not None
            return self._traced.to(torch.get_default_dtype())
        function, args = self._whole
        return function(*[one._large() if issubclass(type(one), LaterValue) else float(one) for one in args])

    def in_graph(self) -> torch.Tensor | None:
        """The value as a traced tensor to compute with, of a comparison its assumed outcome; None where the host alone has it."""
        if self._compared:
            return torch.full((), self.__bool__())
        if self._whole is not None:
            return self.fraction()
        if self._traced is not None or self._later is None:
            return self._traced
        made = self._later()
        return made if isinstance(made, torch.Tensor) else None

    def read_of(self) -> torch.Tensor | None:
        """The tensor of the graph whose numbers these are (``lengths.tolist()``, an entry of it), if they are those of one."""
        if self._compared:
            return self.in_graph()
        if self._traced is not None:
            return None if self._whole is not None else self._traced
        if self._known is not None and self._known.changed:
            return None
        return self._read(self._slot.index, self._slot.path)

    def _read(self, index: int, path: tuple[tuple[str, Any], ...]) -> torch.Tensor | None:
        """A part of a call's result as a tensor of the graph, or None."""
        done = self._calls.calls[index]
        if self._known is None and self._is_taken(index):
            return None
        tensor: torch.Tensor | None
        if done.text in ("tolist", "numpy"):
            tensor = done.args[0]
        elif _method_of(done) in _COPIES:
            whole = done.args[0]._slot
            tensor = self._read(whole.index, whole.path[:-1])
        else:
            tensor = form_of(done.function, done.args, done.kwargs, _read_of, self._calls.likes.get(index))
        for kind, key in path:
            is_entry = kind == "item" and type(key) is int
            if tensor is None or tensor.ndim == 0 or not (is_entry or (kind, key) == ("attr", "T")):
                return None
            tensor = tensor[key] if is_entry else tensor.permute(*reversed(range(tensor.ndim)))
        self._calls.read.add(index)
        return tensor

    def _is_taken(self, index: int) -> bool:
        """Whether a call has got the result of another, which it may have changed; also by way of a view of it."""
        for at, later in enumerate(self._calls.calls[index + 1 :], index + 1):
            leaves = pytree.tree_leaves((later.args, later.kwargs))
            if not any(issubclass(type(one), LaterValue) and one._slot.index == index for one in leaves):
                continue
            name = _method_of(later)
            if not (name in PURE or changes_nothing(later.function)):
                return True
            if may_view(later.function, name) and self._is_taken(at):
                return True
        return False

    def assumed(self, tensor: torch.Tensor) -> int | None:
        """The outcome that the running step is assumed to compute as ``tensor``, a whole number that is mostly 0; None where
        nothing can be."""
        try:
            return None if self._calls.asked is None else int(self._calls.asked.outcome(tensor, likely=0))
        except UnknownValueError:
            return None

    def example(self) -> Any:
        """A value of the same type and shape, or None."""
        return self._like

    @property
    def as_offset(self) -> Offset | None:
        """The number as another and what is added to that, where it is a whole number that is known before the step."""
        known = self._known
        if known is None or known.changed or self._traced is None or type(self._like) is not int:
            return None
        return known.offset or (known.text, 0)

    def drop_unused(self) -> None:
        """Nobody wants it, unless somebody uses it later."""
        self._calls.pure.add(self._slot.index)

    def is_of_state(self) -> bool:
        """Whether it is a real number that buffers or parameters tell before the step."""
        known, kind = self._known, type(self._like)
        return known is not None and known.of_state and not known.changed and self._traced is not None and kind in (int, float)

    def drawn(self) -> HostScalar | None:
        """The expression of a number that torch draws before the step; None of any other value."""
        known, asked = self._known, self._calls.asked
        if known is None or not known.drawn or known.changed or asked is None or type(self._like) not in (int, float):
            return None
        return asked.number(known.of, known.text)

    def known_before(self) -> tuple[Expression, str] | None:
        """An expression that gives it before the step, and its text, where the batch tells it."""
        known = self._known
        return None if known is None or known.of_state or known.changed else (known.of, known.text)

    def may_move(self) -> bool:
        """Whether programs may take it as an input; if not, it is a constant of each."""
        return self._calls.asked is not None and self._calls.asked.offsets.meet()

    def is_of_host(self) -> bool:
        """Whether the host alone computes it, after the step."""
        return self._known is None and self._made is None and self._computes is None

    def stays_a_number(self) -> bool:
        """Whether it is a real number of the graph that only the running step knows."""
        return self._known is None and self._traced is not None and isinstance(self._like, int | float | np.integer)

    def _is_small(self) -> bool:
        """Whether the graph has bits enough for the whole number: a guard where it is known before the step, else assumed."""
        known, asked = self._known, self._calls.asked
        if self._top <= NARROW:
            return True
        if asked is None or (known is not None and known.changed):
            return False
        try:
            if known is not None:
                return asked.assume(lambda host_values: abs(known.of(host_values)) < SAFE, f"whether {known.text} is small")
            return not asked.outcome(self._large().detach().abs() >= SAFE)
        except UnknownValueError:
            return False

    def _record(self, function: Callable[..., Any], args: Any, kwargs: Any, *, pure: bool = False) -> ValueSlot:
        if self._calls.closed:
            raise RuntimeError(
                "a value of a step that was being captured was kept in an object that compiled steps do not follow; keep it in "
                "an attribute, list or dict of the module or of a callback"
            )
        return self._calls.record(function, args, kwargs, text=getattr(function, "__name__", repr(function)), pure=pure)

    # -- what needs the value --------------------------------------------------------------------------------------

    def refusal(self, reason: str, *, at_origin: bool = False) -> Exception:
        """The error for a use that needs the value during the step, here or, with ``at_origin``, where the value comes from."""
        return self._calls.refuse(reason, _FIX, self._calls.calls[self._slot.index].where if at_origin else None)

    def _refuse_as(self, use: str) -> NoReturn:
        raise self.refusal(_needed_by(use))

    def _exact(self, use: str, read: Callable[[Any], Any] | None = None) -> Any:
        """The value, or what ``read`` gives of it, for a use that needs it: what is known before the step is a guard."""
        known, asked = self._known, self._calls.asked
        if known is None and self._traced is not None and read is not None:
            return self._outcome(use, read)
        if known is None or asked is None or known.changed:
            self._refuse_as(use)
        if read is not None:
            known = known.then(read, read.__name__)
        try:
            return asked.assume(known.of, known.text, drawn=known.drawn)
        except UnknownValueError:
            if known.drawn:
                raise self.refusal(
                    f"{use} needs a fraction that torch draws at random: every step would be another program"
                ) from None
            self._refuse_as(use)

    def _outcome(self, use: str, read: Callable[[Any], Any]) -> Any:
        """``read`` of the value where only the running step knows it: one is assumed."""
        traced, asked, compared = self._traced, self._calls.asked, self._compared
        assert traced is not None
        if asked is None:
            self._refuse_as(use)
        if self._whole is not None:
            large = self._large().detach()
            traced = self.fraction().detach() != 0 if read is bool else torch.where(large.abs() < SAFE, traced, _NOT_WHOLE)
        whole = read is int and traced.is_floating_point()
        slot = self._slot
        if whole:  # such as the place that was drawn: int(torch.rand(1).item() * 4); near to the next one the host tells
            slot = self._record(int, (self,), {})
            compared = Compared(traced.detach(), traced.detach().round(), slot)
            traced = torch.where(traced.abs() < WHOLE, traced.detach(), _NOT_WHOLE).to(torch.int32)
        if compared is None:
            self._calls.pure.add(slot.index)  # made for this answer
        else:
            self._calls.used.add(slot.index)
        if read is bool and traced.dtype != torch.bool:
            traced = traced != 0
        try:
            found = asked.outcome(traced, compared=compared, likely=0 if whole else None)
            if (whole or self._whole is not None) and found == _NOT_WHOLE:
                self._refuse_as(use)
            return read(found)
        except UnknownValueError:
            self._refuse_as(use)

    def __bool__(self) -> bool:
        return self._exact("a Python branch (if, and, or, max, in …)", bool)

    def __index__(self) -> int:
        return self._exact("an index or range()", operator.index)

    def __int__(self) -> int:
        return self._exact("int()", int)

    def __float__(self) -> float:
        return self._exact("float()", float)

    def __complex__(self) -> complex:
        return self._exact("complex()", complex)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._exact("a conversion to numpy"), dtype)

    def __hash__(self) -> int:
        use = "a key of a dict or set"
        if not self.stays_a_number() or is_user_file(sys._getframe(1).f_code.co_filename):
            return hash(self._exact(use))
        raise self._calls.unhashable(_needed_by(use), _FIX)  # a library that keeps results by sizes goes on without

    def __len__(self) -> int:
        return len(self._like) if self._like is not None else self._exact("len()", len)

    def __enter__(self) -> Any:
        self._refuse_as("a with block")

    def __exit__(self, *_: Any) -> None:
        """Never reached."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_as("a copy or pickle")


def _read_of(one: Any) -> torch.Tensor | None:
    return one.read_of() if issubclass(type(one), LaterValue) else None


def _method_of(done: HostCall) -> str:
    """The name of the method of a deferred value that a call is of; "" of other calls."""
    method: Any = done.args[0] if done.function is call and done.args else None
    path = method._slot.path if issubclass(type(method), LaterValue) else ()
    return str(path[-1][1]) if path and path[-1][0] == "attr" else ""


def _needed_by(use: str) -> str:
    return (
        f"{use} needs the value of a tensor or of a host call (.item(), .numpy(), a torchmetrics result), which exists only "
        "after the step has run"
    )
