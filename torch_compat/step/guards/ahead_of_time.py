"""A captured backward pass whose Python runs earlier than it would: what it reads may be another by then."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torch_compat.step.effects.recorder import changing_nothing
from torch_compat.step.guards.known_functions import is_plain
from torch_compat.step.guards.notes import Notes, Observer, observed_through
from torch_compat.step.values.marks import has_contents
from xlatrain.bridge.errors import CaptureError, user_line

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type)


@contextlib.contextmanager
def ahead_of_time(refusal: Callable[[str], CaptureError]) -> Iterator[None]:
    """A captured backward pass, whose Python runs earlier than it would: it may do nothing but compute.

    Args:
        refusal: the error for what it does.

    Raises:
        CaptureError: it has effects on the host, or reads what may be another by then.
    """

    def reads(what: str) -> None:
        stack = traceback.extract_stack()
        if any(frame.filename.endswith(_RECOMPUTED) for frame in stack):
            return  # the forward pass once more, which must be as it was
        raise refusal(f"reads {what} ({user_line(stack)})")

    late: Any = functools.partial(_Late, told=reads)
    with observed_through(late), changing_nothing(refusal):
        yield


_RECOMPUTED = ("torch/utils/checkpoint.py", "torch\\utils\\checkpoint.py")


class _Late:
    """An observer that passes everything on, and tells of reads of what a hook on the host may change.

    Args:
        observer: the one to pass on to.
        told: is called with what is read.
    """

    def __init__(self, observer: Observer, told: Callable[[str], None]) -> None:
        self._observer = observer
        self._told = told
        self.of_library = False

    def _pass(self, what: str, *args: Any) -> Any:
        self._observer.of_library = self.of_library
        return getattr(self._observer, what)(*args)

    def __getattr__(self, what: str) -> Any:  # what else it is told
        return functools.partial(self._pass, what)

    def enter(self, key: str) -> None:
        self._pass("enter", key)
        frame = next(one for one, _ in traceback.walk_stack(None) if one.f_globals["__name__"] not in _OURS)
        for names, held in (
            (_globals_of(frame.f_code), frame.f_globals),
            (frame.f_code.co_freevars, frame.f_locals),
        ):
            for name in names:
                if name in held and _is_state(held[name]):
                    self._told(name)

    def attribute(self, owner: Any, name: str) -> None:
        self._pass("attribute", owner, name)
        if isinstance(owner, torch.Tensor | torch.autograd.function.FunctionCtx | types.ModuleType):
            return
        found = inspect.getattr_static(owner, name, None)
        of_users = hasattr(type(found), "__get__") and not isinstance(found, _SLOTS)
        if of_users and not type(owner).__module__.startswith("torch_compat."):
            return  # a function or property of the user's, which enters itself
        if _is_state(getattr(owner, name, None)):
            self._told(f"{type(owner).__name__}.{name}")

    def call(self, function: Any) -> Any:
        if function in (vars, globals, locals):
            self._told(f"what {function.__name__} gives")
        called = self._pass("call", function)
        if function is not getattr:
            return called

        def asking(owner: Any, name: Any, *default: Any) -> Any:
            if isinstance(name, str):
                self.attribute(owner, name)
            return called(owner, name, *default)

        return asking

    def source(self, source: Any, names: dict[str, Any], variables: Mapping[str, Any]) -> None:
        self._pass("source", source, names, variables)
        self._told("what eval or exec names")


_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_OURS = (__name__, Notes.__module__)


def _globals_of(code: types.CodeType) -> set[str]:
    """The global names that a function reads."""
    return {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}


def _is_state(value: Any) -> bool:
    """Whether a hook may change it, or have put another value in its place: a number, a tensor, a container; not a function."""
    if isinstance(value, _FUNCTIONS):
        return False
    of_python = type(value).__module__.partition(".")[0] in sys.stdlib_module_names  # a ChainMap, a Queue
    return is_plain(value) or isinstance(value, torch.Tensor) or has_contents(type(value)) or of_python
