"""A text into which a step's Python formats values that come after the step: a mark stands for each of them until then."""

from __future__ import annotations

import contextlib
import contextvars
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from xlatrain.bridge.errors import chain_of, is_user_file

MARK, END = "\u29da\u2e28", "\u2e29\u29db"  # characters that can be printed and are no space: no function drops them unseen

_FIX = "format values in a hook such as on_train_batch_end"
_DEPTH = 3
_PLAIN = (bool, int, str, type(None))


class Recorder(Protocol):
    """Notes what is made of values that come after the step."""

    def text_of(self, function: Callable[..., str], *args: Any) -> str:
        """The text that stands for ``function(*args)``."""
        ...

    def note_put_together(self, text: str) -> None:
        """Note a text with marks that followed code has put together."""
        ...

    def note_given(self, text: str) -> None:
        """Note a text with marks that a function has got whose code is not followed."""
        ...

    def refuse(self, reason: str, fix: str) -> Exception:
        """The error for a use of a value that does not exist yet."""
        ...


RECORDER: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("xlatrain_texts", default=None)
"""The recorder of the capture that runs, once it has made a text."""


class LaterText(str):
    """A text with marks in it. It is passed on, kept, said, put into other texts and padded; other looks end the capture."""

    __slots__ = ()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return str

    def plain(self) -> str:
        """The text as it is, marks and all."""
        return str.__str__(self)

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self.by(repr)

    def __format__(self, specification: str) -> str:
        return self.by(format, specification) if specification else self

    def __bool__(self) -> bool:
        return True  # a text of a value is not empty

    def __add__(self, other: Any) -> str:
        return later_text(self.plain() + (other.plain() if type(other) is LaterText else other))

    def __radd__(self, other: Any) -> str:
        return later_text(other + self.plain())

    def __mul__(self, times: Any) -> str:
        return later_text(self.plain() * times)

    __rmul__ = __mul__  # pyright: ignore[reportAssignmentType]

    def __rmod__(self, template: Any) -> Any:
        return later_text(template % (self,))

    def __copy__(self) -> str:
        return self

    def __deepcopy__(self, memo: Any) -> str:
        return self

    def by(self, function: Callable[..., str], *args: Any) -> str:
        """The text that stands for ``function(text, *args)``.

        Raises:
            Exception: what it raises of any text.
        """
        if not all(type(arg) in _PLAIN for arg in args) or (function is format and "." in args[0]):
            raise looked_at()
        function("0", *args)
        return _recorder().text_of(function, self, *args)

    def by_percent(self, form: str) -> str:
        """The text that stands for ``form % text``."""
        _ = form % "0"
        return _recorder().text_of(operator.mod, form, self)


def _recorder() -> Recorder:
    recorder = RECORDER.get()
    assert recorder is not None
    return recorder


def looked_at() -> Exception:
    """The error of a look at a text."""
    return _recorder().refuse(
        "it formats the value of a tensor into a text and then uses the text otherwise than by printing, logging, storing, "
        "padding or returning it",
        _FIX,
    )


def _later(name: str) -> Any:
    return lambda self, *args: self.by(getattr(str, name), *args)


def _refused(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise looked_at()


_PADS = ("rjust", "ljust", "center", "zfill", "upper", "lower", "title", "capitalize", "swapcase", "casefold")
_KEPT = frozenset(
    {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__", "__delattr__", "__dir__"}
    | {"__doc__", "__sizeof__"}
)
for _name in set(dir(str)) - _KEPT - vars(LaterText).keys():
    setattr(LaterText, _name, _later(_name) if _name in _PADS else _refused)


def later_text(text: str) -> str:
    """``text``, which may have marks, as what tells who looks at it."""
    return LaterText(text) if type(text) is str and MARK in text else text


def put_together(text: str) -> str:
    """:func:`later_text`, of a text that followed code has put together."""
    recorder = RECORDER.get()
    if recorder is not None and str.__contains__(text, MARK):
        recorder.note_put_together(text)
    return later_text(text)


@contextlib.contextmanager
def plain_messages() -> Iterator[None]:
    """Exceptions that leave the step have ordinary texts, with … for what comes later: who catches them is none of its code."""
    try:
        yield
    except Exception as error:
        for told in chain_of(error):
            told.args = tuple(_cut(one) if type(one) is LaterText else one for one in told.args)
        raise


def _cut(text: LaterText) -> str:
    head, *others = text.plain().split(MARK)
    return head + "".join(f"…{other.partition(END)[2]}" for other in others)


def result_of(function: Any, value: Any) -> Any:
    """The result of a function whose own code is not followed, as followed code has it."""
    return put_together(value) if _makes_texts(function) and issubclass(type(value), str) else later_text(value)


def has_marks(value: Any) -> bool:
    """Whether a value, or what is in a container, is a text with marks."""
    return any(True for _ in _marked(value))


def _marked(value: Any, depth: int = 0) -> Iterator[str]:
    """The texts with marks that a value is, or that are in a container."""
    kind = type(value)
    if kind is LaterText or (kind is str and MARK in value):
        yield value
    elif depth < _DEPTH and kind in (list, tuple, dict, deque):
        for one in value.values() if kind is dict else value:
            yield from _marked(one, depth + 1)


_LOOKING = frozenset(
    {"ascii", "bytearray", "bytes", "compile", "complex", "eval", "exec", "float", "int", "memoryview", "open", "ord"}
    | {"__import__", "input"}
)
"""Functions of Python that read a text without asking it."""
_ASKING = frozenset(
    {"builtins", "operator", "itertools", "functools", "collections", "heapq", "bisect", "copy", "queue", "dataclasses"}
    | {"contextlib", "typing", "weakref", "logging", "lightning_utilities", "tqdm"}
    | {"torch_compat", "xlatrain"}
)
"""Modules whose functions look at a text by asking it."""
_NAMED = (getattr, hasattr, setattr, delattr)


def check_kept(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """To be called before a function that is not known to be the user's.

    Raises:
        CaptureError: it is given a text with marks, and may look at it unseen.
    """
    recorder = RECORDER.get()
    if recorder is None:
        return
    given = (*args, *kwargs.values())
    if any(function is one for one in _NAMED):
        if has_marks(args[1:2]):
            raise looked_at()
        return
    marked = [text for one in given for text in _marked(one)]
    if marked and not _asks(function):
        raise looked_at()
    if not _makes_texts(function):
        for text in marked:
            recorder.note_given(text)
    for one in given:
        if callable(one) and not _asks(one) and (marked or (_is_of_texts(one) and any(isinstance(o, Iterator) for o in given))):
            raise looked_at()


def _is_of_texts(function: Any) -> bool:
    return type(function) is types.MethodDescriptorType and function.__objclass__ is str


def _makes_texts(function: Any) -> bool:
    """Whether all that a function does with texts is to put them together."""
    return _is_of_a_text(function) or _is_of_texts(function) or any(function is one for one in (str, repr, format))


def _is_of_a_text(function: Any) -> bool:
    return issubclass(type(getattr(function, "__self__", None)), str)


def _asks(function: Any) -> bool:
    """Whether a function looks at texts by asking them, if it does, so that they know."""
    if _is_of_texts(function):
        return function.__name__ == "join"
    owner = getattr(function, "__self__", None)
    if _is_of_a_text(function):
        return type(owner) is LaterText or function.__name__ in ("join", "format")
    if isinstance(function, types.FunctionType | types.MethodType) and is_user_file(function.__code__.co_filename):
        return True
    if isinstance(function, type) and issubclass(function, BaseException):
        return True
    held = owner if owner is not None and not isinstance(owner, types.ModuleType) else None
    module = getattr(function, "__module__", None) or type(function if held is None else held).__module__
    root = module.partition(".")[0].removeprefix("_")
    return getattr(function, "__name__", "") not in _LOOKING and root in _ASKING
