"""Memory that tensors share with arrays and buffers (``t.numpy()``, ``torch.from_numpy(a)``): a graph has no such memory."""

from __future__ import annotations

import array
import contextlib
import contextvars
import hashlib
import operator
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from xlatrain.bridge.capture.foreign_memory import span_of, telling_lifted
from xlatrain.bridge.capture.op_log import Seen
from xlatrain.bridge.capture.recorded.tape import ops_so_far, uses_since
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.tensors.constants import SMALL, bytes_of, contents_of

_FIX = "copy it first (tensor.clone(), torch.tensor(array), array.copy()), or change it in a hook such as on_train_batch_end"
_VIEWS = frozenset({"T", "reshape", "ravel", "view", "transpose", "squeeze", "swapaxes", "diagonal"})
"""Attributes and methods of an array that may give its memory."""
_COPY = ("tensor", "scalar_tensor", "new_tensor")
"""Functions of torch whose tensors have memory of their own."""
_BUFFERS = (np.ndarray, bytearray, array.array, memoryview)
_KEPT = "a tensor is kept that shares its memory with an array which the step has not made"
_VIEW = "an array is changed of which another one is a view"
_WHOLE = 1 << 29
"""Bytes. Of larger buffers one word in so many is compared."""
_PART = 64

_Span = tuple[int, int]
"""Addresses: the first, and the one after the last."""
_Spans = list[tuple[_Span, torch.Tensor]]

_ACTIVE: contextvars.ContextVar[HostMemory | None] = contextvars.ContextVar("xlatrain_host_memory", default=None)


class Refusal(NamedTuple):
    """A refusal of what shares memory, unless the step has made it and it is gone with the step.

    Attributes:
        of: what would be there still; None for what cannot be asked whether it is.
        where: the user's line.
        reason: of the refusal.
    """

    of: tuple[weakref.ref[Any] | None, ...]
    where: str
    reason: str


class _Lifted(NamedTuple):
    """A tensor that the step has made of a buffer: ``outside`` has its memory, ``copy`` its values, ``tensor`` is the step's."""

    outside: torch.Tensor
    copy: torch.Tensor
    tensor: torch.Tensor
    where: str


class _Met(NamedTuple):
    """A buffer that the step reads or changes: its addresses, a digest of what was in it, and the line where it was met."""

    buffer: Any
    span: _Span
    before: bytes
    where: str

    @classmethod
    def of(cls, buffer: Any) -> _Met | None:
        """The buffer as it is now; None where it has no numbers, or is released."""
        try:
            return cls(buffer, _span(buffer), _digest(buffer), user_line(traceback.extract_stack()) or "the step")
        except (TypeError, ValueError, BufferError):  # an array of objects, an empty one, one in pieces
            return None

    def is_changed(self) -> bool:
        """Whether there is something else in it now."""
        try:
            return _digest(self.buffer) != self.before
        except ValueError:  # released since
            return False


class HostMemory:
    """The tensors of a run whose memory a buffer of the host has as well. One must not be changed behind the other's back."""

    def __init__(self) -> None:
        self._of_calls: dict[int, tuple[torch.Tensor, str]] = {}
        self._changed: list[tuple[torch.Tensor, int, str]] = []
        self._of_module: set[int] = set()
        self._after: dict[int, Refusal] = {}
        self._shown: dict[int, tuple[weakref.ref[np.ndarray], str]] = {}
        self.refusals: list[Refusal] = []
        self._forget()

    def _forget(self) -> None:
        """Let go of buffers: who else holds one shows whether the step has made it."""
        self._tensors: list[tuple[torch.Tensor, int, str]] = []
        self._met: dict[int, _Met] = {}
        self._lifted: list[_Lifted] = []
        self._made: list[tuple[np.ndarray, bytes, str]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Note what shares memory in the block."""
        token = _ACTIVE.set(self)
        try:
            with telling_lifted(self._lift):
                yield
        finally:
            _ACTIVE.reset(token)

    def _lift(self, outside: torch.Tensor, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        where = user_line(traceback.extract_stack()) or "the step"
        self.note(tensor, where)
        self._lifted.append(_Lifted(outside, copy, tensor, where))

    def note(self, tensor: torch.Tensor, where: str, *, call: int | None = None, made: np.ndarray | None = None) -> None:
        """A tensor of the step and an array share memory from now on.

        Args:
            where: the user's line that made one of the other.
            call: the index of the host call that makes the array of the tensor.
            made: the array that was made of the tensor, whose values are known.
        """
        if made is not None:
            self._made.append((made, made.tobytes(), where))
            if _memory(tensor) in self._of_module:
                self._shown[id(made)] = weakref.ref(made), where
        if not tensor.is_inference():  # which has no version
            self._tensors.append((tensor, tensor._version, where))
        if call is not None:
            self._of_calls[call] = (tensor, where)

    def has(self, tensors: Iterable[torch.Tensor]) -> None:
        """The module has these, parameters and buffers, before the step and after it."""
        self._of_module.update(map(_memory, tensors))

    def views(self, view: int, call: int) -> None:
        """The array that a host call makes may be a view of the other's."""
        if call in self._of_calls:
            self._of_calls[view] = self._of_calls[call]

    def changes(self, call: int) -> None:
        """The array that a host call makes is changed in place."""
        found = self._of_calls.get(call)
        if found is not None:
            self._changed.append((found[0], ops_so_far(), found[1]))

    def meet(self, buffer: Any) -> None:
        """The step is about to read or to change a buffer."""
        if id(buffer) not in self._met and (met := _Met.of(buffer)) is not None:
            self._met[id(buffer)] = met

    def check(
        self,
        outside: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        later: Sequence[torch.Tensor],
    ) -> None:
        """Look, at the end of the run, whether one was changed while the other may have been used.

        Args:
            outside: tensors that the run was not given, and computes with.
            own: parameters, buffers, and tensors that are carried, on the host.
            written: those of them that the step has written to.
            later: those that change after it.

        Raises:
            CaptureError: names the line.
        """
        tensors, met, lifted, made = self._tensors, list(self._met.values()), self._lifted, self._made
        self._forget()
        for tensor, version, where in tensors:
            if tensor._version != version:
                raise _error(where, "a tensor is changed in place after it has shared its memory with an array")
        for one in lifted:
            if not _same_values(one.outside, one.copy):
                raise _error(one.where, "an array is changed in place after it has shared its memory with a tensor")
        for one, before, where in made:
            if one.tobytes() != before:
                raise _error(where, "an array is changed in place after it has shared its memory with a tensor")
        for tensor, since, where in self._changed:
            if uses_since(tensor, since):
                raise _error(where, "an array is changed in place, and the tensor whose memory it has is used after that")
        _check_views(outside, written)
        if met:
            changed = [one for one in met if one.is_changed()]
            large = [one for one in outside if one.nbytes > SMALL]  # ops have seen the contents of small ones: check_after
            _check_met(met, changed, _foreign([*large, *own]), _foreign([*written, *later]))
            self.refusals += _views_of(met, changed)
            for one in lifted:
                buffer = next((known.buffer for known in met if _meet(known.span, _elements(one.outside))), None)
                if buffer is not None:
                    self._after[_memory(one.tensor)] = Refusal((_weakly(buffer),), one.where, _KEPT)

    def keeps(self, tensor: torch.Tensor) -> None:
        """A tensor of the step is kept beyond it: stored or returned.

        Raises:
            CaptureError: an array with its memory is changed.
        """
        memory = _memory(tensor)
        for one, _, where in self._changed:
            if _memory(one) == memory:
                raise _error(where, "an array is changed in place, and the tensor whose memory it has is kept")
        if memory in self._after:
            self.refusals.append(self._after[memory])

    def keeps_array(self, array: np.ndarray | int) -> None:
        """An array, or the one that a host call of this index makes, is kept beyond the step.

        Raises:
            CaptureError: it shows a parameter or a buffer, which changes.
        """
        if isinstance(array, int):
            tensor, where = self._of_calls.get(array, (None, ""))
            is_shown = tensor is not None and _memory(tensor) in self._of_module
        else:
            shown, where = self._shown.get(id(array), (None, ""))
            is_shown = shown is not None and shown() is array
        if is_shown:
            raise _error(where, "an array that has the memory of a parameter or a buffer is kept, and shows its later values")


def check_after(refusals: Iterable[Refusal], seen: Iterable[Seen]) -> None:
    """To be called when all that the step did was taken back, and what it has made is gone.

    Args:
        seen: the contents of constants of the graph, as ops have seen them.

    Raises:
        CaptureError: somebody else has what shares memory; or a constant has other contents again.
    """
    for one in seen:
        if one.contents != {contents_of(one.tensor)}:
            shown = f"a tensor {tuple(one.tensor.shape)} of {one.tensor.dtype}"
            raise _error(one.where, f"an array is changed, and {shown} that is used has the same memory")
    for one in refusals:
        if all(ref is None or ref() is not None for ref in one.of):
            raise _error(one.where, one.reason)


def note_met(buffer: Any) -> None:
    """The step that runs is about to read or to change an object."""
    if isinstance(buffer, _BUFFERS) and (memory := _ACTIVE.get()) is not None:
        memory.meet(buffer)


def made_of(factory: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The tensor that a function or class of torch makes of what may be an array that is there after the step."""
    made, memory = factory(*args, **kwargs), _ACTIVE.get()
    is_later = args and isinstance(args[0], np.ndarray) and type(args[0]) is not np.ndarray
    shares = factory.__name__ not in _COPY and is_later and str(made.dtype).removeprefix("torch.") == str(args[0].dtype)
    if memory is not None and shares:
        memory.note(made, user_line(traceback.extract_stack()) or "the step")
    return made


def may_view(function: Any, name: str) -> bool:
    """Whether what a function, or an attribute of this name, gives of an array may have its memory."""
    return function in (operator.getitem, np.asarray, np.transpose) or name in _VIEWS


def _foreign(tensors: Sequence[torch.Tensor]) -> _Spans:
    return [(span, one) for one in tensors if (span := span_of(one, foreign=True)) is not None]


def _check_met(met: list[_Met], changed: list[_Met], outside: _Spans, written: _Spans) -> None:
    """Refuse a buffer that is changed or read where a tensor with its memory is read or changed."""
    for one in met if outside else ():
        is_changed = any(one is other for other in changed)
        for span, tensor in outside if is_changed else written:
            if _meet(one.span, span):
                kind, shown = type(one.buffer).__name__, f"a tensor {tuple(tensor.shape)} of {tensor.dtype}"
                what = f"a {kind} is changed, and {shown}" if is_changed else f"{shown} changes, and a {kind} that is read"
                raise _error(one.where, f"{what} has the same memory")


def _views_of(met: list[_Met], changed: list[_Met]) -> Iterator[Refusal]:
    """Refusals of buffers that are changed, each with another one that has its memory."""
    for one in changed:
        for other in met:
            if other is not one and _meet(one.span, other.span):
                yield Refusal((_weakly(one.buffer), _weakly(other.buffer)), one.where, _VIEW)


def _check_views(outside: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
    """Refuse a tensor that the step writes to, and of which it reads another one that has the same memory."""
    spans = [(span, one) for one in outside if (span := span_of(one)) is not None] if written else []
    for one in written:
        span = span_of(one)
        if span is not None and any(other is not one and _meet(span, shown) for shown, other in spans):
            what = f"it writes in place to a buffer {tuple(one.shape)}, of which another one that it is given is a view"
            raise _error("the step", what)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = bytes_of(one), bytes_of(other)
    return first is None or second is None or np.array_equal(first, second)


def _span(buffer: Any) -> _Span:
    """The addresses of a buffer."""
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if array.dtype.hasobject or not array.size:
        raise ValueError("a buffer without numbers")
    return np.lib.array_utils.byte_bounds(array)


def _digest(buffer: Any) -> bytes:
    """A digest of a buffer's contents; of one that would take a second to read, of a part of each page."""
    memory = memoryview(buffer)
    if memory.nbytes > _WHOLE:
        contents = np.frombuffer(memory, np.uint64 if memory.nbytes % 8 == 0 else np.uint8)[::_PART].tobytes()
    else:
        contents = memory if memory.c_contiguous else memory.tobytes()
    return hashlib.blake2b(contents, digest_size=16).digest()


def _elements(tensor: torch.Tensor) -> _Span:
    """The addresses of the elements of a dense tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + max(1, tensor.nbytes)


def _meet(one: _Span, other: _Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _weakly(buffer: Any) -> weakref.ref[Any] | None:
    with contextlib.suppress(TypeError):
        return weakref.ref(buffer)
    return None


def _error(where: str, reason: str) -> CaptureError:
    return CaptureError(f"{where}\n  cannot be captured: {reason}.\n  Fix: {_FIX}.")
