"""Memory that tensors and arrays of a run share, as by ``t.numpy()`` and ``torch.from_numpy(a)``: a graph has no such memory."""

from __future__ import annotations

import contextlib
import contextvars
import operator
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from xlatrain.bridge.capture.recorded.tape import ops_so_far, uses_since
from xlatrain.bridge.errors import CaptureError, user_line

_FIX = "copy it first (tensor.clone(), torch.tensor(array), array.copy()), or change it in a hook such as on_train_batch_end"
_COPY = ("tensor", "scalar_tensor", "new_tensor")
"""Functions of torch whose tensors have memory of their own."""
_VIEWS = frozenset({"T", "reshape", "ravel", "view", "transpose", "squeeze", "swapaxes", "diagonal"})
"""Attributes and methods of an array that may give its memory."""

_ACTIVE: contextvars.ContextVar[SharedMemory | None] = contextvars.ContextVar("xlatrain_shared_memory", default=None)


class SharedMemory:
    """The tensors of a run whose memory is an array's as well. One of the two must not be changed behind the other's back."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._tensors: list[tuple[torch.Tensor, int, str]] = []
        self._arrays: list[tuple[np.ndarray, bytes, str]] = []
        self._of_calls: dict[int, tuple[torch.Tensor, str]] = {}
        self._changed: list[tuple[torch.Tensor, int, str]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let :func:`made_of` note here what it makes in the block."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def note(self, tensor: torch.Tensor, where: str, *, call: int | None = None, array: np.ndarray | None = None) -> None:
        """A tensor and an array share memory from now on.

        Args:
            where: the user's line that made one of the other.
            call: the index of the host call that makes the array of the tensor.
            array: it is known.
        """
        if not tensor.is_inference():  # which has no version
            self._tensors.append((tensor, tensor._version, where))
        if call is not None:
            self._of_calls[call] = (tensor, where)
        if array is not None:
            self._arrays.append((array, array.tobytes(), where))

    def views(self, view: int, call: int) -> None:
        """The array that a host call makes may be a view of the other's."""
        if call in self._of_calls:
            self._of_calls[view] = self._of_calls[call]

    def changes(self, call: int) -> None:
        """The array that a host call makes is changed in place."""
        found = self._of_calls.get(call)
        if found is not None:
            self._changed.append((found[0], ops_so_far(), found[1]))

    def check(self) -> None:
        """Look, at the end of the run, whether one was changed while the other may have been used.

        Raises:
            CaptureError: names the line that made one of the other.
        """
        tensors, arrays, changed = self._tensors, self._arrays, self._changed
        self._forget()  # who else holds an array shows whether the step has made it
        for tensor, version, where in tensors:
            if tensor._version != version:
                raise _error(where, "a tensor is changed in place after it has shared its memory with an array")
        for array, before, where in arrays:
            if array.tobytes() != before:
                raise _error(where, "an array is changed in place after it has shared its memory with a tensor")
        for tensor, since, where in changed:
            if uses_since(tensor, since):
                raise _error(where, "an array is changed in place, and the tensor whose memory it has is used after that")


def made_of(factory: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The tensor that a function or class of torch makes of an array.

    It has a copy: a constant of the graph must not be an array that is put back after the run.
    """
    given, shared = args[0] if args else None, _ACTIVE.get()
    known = type(given) is np.ndarray
    if shared is None or not isinstance(given, np.ndarray):
        return factory(*args, **kwargs)
    made = factory(np.array(given) if known else given, *args[1:], **kwargs)
    if factory.__name__ not in _COPY and str(made.dtype).removeprefix("torch.") == str(given.dtype):
        where = user_line(traceback.extract_stack()) or "the step"
        shared.note(made, where, array=given if known else None)
    return made


def may_view(function: Any, name: str) -> bool:
    """Whether what a function, or an attribute of this name, gives of an array may have its memory."""
    return function in (operator.getitem, np.asarray, np.transpose) or name in _VIEWS


def _error(where: str, reason: str) -> CaptureError:
    return CaptureError(f"{where}\n  cannot be captured: {reason}.\n  Fix: {_FIX}.")
