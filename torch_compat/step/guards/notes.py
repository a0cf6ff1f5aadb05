"""The notes of rewritten functions: each tells the observer of this moment about a read or a change, before it happens."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch_compat.step.host.later_text import has_marks, looked_at, put_together
from torch_compat.step.host.percent import percent
from torch_compat.step.host.said import is_recording, said
from xlatrain.bridge.errors import CaptureError, user_line


class Observer(Protocol):
    """The receiver of the notes: it is told about the reads of a step."""

    @property
    def of_library(self) -> bool:
        """Whether the code that tells it something is of an installed package."""
        ...

    @of_library.setter
    def of_library(self, of_library: bool) -> None: ...

    def enter(self, key: str) -> None:
        """A function begins."""

    def attribute(self, owner: Any, name: str) -> None:
        """``owner.name`` is about to be read."""

    def entry(self, holder: Any, key: Any) -> None:
        """``holder[key]`` is about to be read."""

    def value(self, value: Any) -> None:
        """All that is in ``value`` may be read: it is compared, iterated over, asked for its truth or length."""

    def stores(self, owner: Any, name: str) -> None:
        """``owner.name`` is about to be assigned or deleted."""

    def updates(self, owner: Any, name: str) -> None:
        """``owner.name += …`` is about to change what is there, if it can be changed."""

    def fills(self, holder: Any) -> None:
        """``holder[…]`` is about to be assigned or deleted."""

    def call(self, function: Any) -> Any:
        """``function`` is about to be called; what is called instead."""

    def member(self, item: Any, holder: Any) -> None:
        """Whether ``item`` is in ``holder`` is about to be asked."""

    def source(self, source: Any, names: dict[str, Any], variables: Mapping[str, Any]) -> None:
        """``eval`` or ``exec`` is about to run ``source`` with these global and local variables."""


class _Receiver:
    """The observer of this moment, if there is one, and its thread."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.thread = 0
        self.busy = False
        self.is_said = False  # whether the function that is about to be called notes all that it is given


class Notes:
    """The object that instrumented code calls; nothing happens but in the thread and in the time of an observation.

    Nor does anything while the observer itself works: what it asks an object may run code with notes.
    """

    slice = slice

    def __init__(self, receiver: _Receiver, *, of_library: bool) -> None:
        self._receiver = receiver
        self._of_library = of_library

    def _tell(self, what: str, *args: Any) -> Any:
        receiver = self._receiver
        observer = receiver.observer
        if observer is None or receiver.busy or threading.get_ident() != receiver.thread:
            return args[0]
        receiver.busy = True
        observer.of_library = self._of_library
        try:
            return getattr(observer, what)(*args)
        except Exception as error:  # a read that is not known must not be missed
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(
                f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: its reads of a "
                f"{type(args[0]).__qualname__} could not be followed ({type(error).__name__}: {error}).\n  Fix: read it in a "
                "hook such as on_train_batch_start, and keep it as an attribute of the module."
            ) from error
        finally:
            receiver.busy = False

    def enter(self, key: str) -> None:
        self._tell("enter", key)

    def attribute(self, owner: Any, name: str) -> Any:
        self._tell("attribute", owner, name)
        return owner

    def text(self, text: str) -> str:
        """The note of a text that was put together."""
        return put_together(text)

    def entry(self, holder: Any, key: Any) -> Any:
        self._tell("entry", holder, key)
        chosen = getattr(type(key), "entry_of", None)  # a number that later steps know anew
        return holder[key] if chosen is None else chosen(key, holder)

    def value(self, value: Any) -> Any:
        self._tell("value", value)
        return value

    def stores(self, owner: Any, name: str) -> Any:
        self._tell("stores", owner, name)
        return owner

    def changes(self, owner: Any, name: str) -> Any:
        self._tell("attribute", owner, name)
        self._tell("stores", owner, name)
        self._tell("updates", owner, name)
        return owner

    def fills(self, holder: Any) -> Any:
        self._tell("fills", holder)
        return holder

    def updates(self, holder: Any) -> Any:
        self._tell("value", holder)
        self._tell("fills", holder)
        return holder

    def call(self, function: Any) -> Any:
        return self._tell("call", function)

    def source(self, source: Any, *around: Any) -> tuple[Any, ...]:
        frame = sys._getframe(1)
        names = around[0] if around and around[0] is not None else frame.f_globals
        variables = around[1] if len(around) > 1 and around[1] is not None else frame.f_locals
        self._tell("source", source, names, variables)
        return source, *around

    def saying(self, function: Any) -> Any:
        """The note of a call, see :meth:`call`, of a function that is given texts."""
        receiver = self._receiver
        if receiver.observer is not None and threading.get_ident() == receiver.thread:
            receiver.is_said = not self._of_library and is_recording(function)
        return self.call(function)

    def said(self, value: Any) -> Any:
        return said(value) if self._receiver.is_said and threading.get_ident() == self._receiver.thread else value

    def formats(self, template: str, values: Any, is_argument: bool) -> str:
        is_said = is_argument and self._receiver.is_said and threading.get_ident() == self._receiver.thread
        return percent(template, values, is_said=is_said)

    def contains(self, item: Any, holder: Any) -> Any:
        self._tell("member", item, holder)
        if type(holder) is str and has_marks(item):
            raise looked_at()
        asked = getattr(type(item), "is_in", None)
        return item in holder if asked is None else asked(item, holder)


@contextlib.contextmanager
def observed_through(wrapped: Callable[[Observer], Observer]) -> Iterator[None]:
    """Within the block, the observer of this moment is told through another one, if there is one."""
    before = RECEIVER.observer
    if before is not None:
        RECEIVER.observer = wrapped(before)
    try:
        yield
    finally:
        RECEIVER.observer = before


RECEIVER = _Receiver()
NOTES = Notes(RECEIVER, of_library=False)
LIBRARY_NOTES = Notes(RECEIVER, of_library=True)
