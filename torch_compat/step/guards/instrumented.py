"""The user's functions with a note before each of their reads, for as long as a step is captured.

A function's source is parsed, each operation on an object that may hold state of the host tells its notes about it, and the
result is compiled: the function has that code while a capture runs, and its own again afterwards. Source and not bytecode is
rewritten, so that it is the same on every version of Python; that what was parsed is what was loaded is checked by its code.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import marshal
import os
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

from torch_compat.step.guards.notes import LIBRARY_NOTES, NOTES, RECEIVER, Notes, Observer
from torch_compat.step.guards.rewriter import ENTERED, MARK, Rewriter
from xlatrain.bridge.errors import CaptureError, is_user_file
from xlatrain.xla import kept_files


class _File:
    """A source file's functions, as they are loaded and with notes."""

    def __init__(self, filename: str, source: str) -> None:
        loaded, noted = _codes(filename, source)
        self._found: dict[tuple[str, int], list[tuple[types.CodeType, types.CodeType]]] = {}
        notes = NOTES if is_user_file(filename) else LIBRARY_NOTES
        for before, after in _pairs(loaded, noted, notes):
            self._found.setdefault((before.co_qualname, before.co_firstlineno), []).append((before, after))

    def noted(self, code: types.CodeType) -> types.CodeType | None:
        """The code of a function with notes; None where the file has another one now."""
        found = self._found.get((code.co_qualname, code.co_firstlineno), ())
        for before, after in found:
            if _are_same(before, code) and list(before.co_positions())[-1:] == list(code.co_positions())[-1:]:
                return after
        rewritten = any(name.startswith("@py") for name in (*code.co_names, *code.co_varnames))  # pytest's asserts
        if rewritten and len(found) == 1 and found[0][0].co_freevars == code.co_freevars:
            return found[0][1]
        return None


def _codes(filename: str, source: str) -> tuple[types.CodeType, types.CodeType]:
    """A file's code as it is loaded, and with notes, in whose places there are marks yet.

    Both are kept for the next process: rewriting took 0.15 s for a file of 400 lines.
    """
    key = kept_files.key_of(filename, source) if os.path.isfile(filename) else None
    found = None if key is None else kept_files.read(_KIND, key)
    if found is not None:
        loaded, noted = marshal.loads(found)
        return loaded, noted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source, filename)
        loaded = compile(tree, filename, "exec", dont_inherit=True)
        tree = ast.fix_missing_locations(Rewriter(filename).visit(ast.parse(source, filename)))
        noted = compile(tree, filename, "exec", dont_inherit=True)
    if key is not None:
        kept_files.write(_KIND, key, marshal.dumps((loaded, noted)))
    return loaded, noted


_KIND = "notes"


def _are_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two codes do the same: a file may have been edited since it was imported, if only in a number."""
    alike = one.co_code == other.co_code and one.co_names == other.co_names and len(one.co_consts) == len(other.co_consts)
    return alike and all(map(_is_same_constant, one.co_consts, other.co_consts))


def _is_same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
        return _are_same(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same_constant, one, other))
    if isinstance(one, float | complex):
        return type(one) is type(other) and repr(one) == repr(other)
    return type(one) is type(other) and one == other


def _pairs(before: types.CodeType, after: types.CodeType, notes: Notes) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """Each code of a module and the one that stands for it."""
    ours = [one for one in after.co_consts if isinstance(one, types.CodeType)]
    theirs = [one for one in before.co_consts if isinstance(one, types.CodeType)]
    if len(ours) != len(theirs):
        return
    for one, other in zip(theirs, ours, strict=True):
        yield one, _with_notes(other, notes)
        yield from _pairs(one, other, notes)


def _with_notes(code: types.CodeType, notes: Notes) -> types.CodeType:
    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _with_notes(value, notes)
        return notes if type(value) is str and value == MARK else value

    return code.replace(co_consts=tuple(map(constant, code.co_consts)))


@functools.lru_cache(maxsize=256)
def _file(filename: str, length: int) -> _File | None:
    lines = linecache.getlines(filename)
    try:
        return _File(filename, "".join(lines)) if length else None
    except (SyntaxError, ValueError, RecursionError):
        return None


_noted: dict[int, tuple[types.CodeType, types.CodeType | None]] = {}  # by id of the first, which is kept


def noted_code(code: types.CodeType) -> types.CodeType | None:
    """The code with notes; None where the source that it was compiled from is not there any more."""
    found = _noted.get(id(code))
    if found is None:
        file = _file(code.co_filename, len(linecache.getlines(code.co_filename)))
        found = _noted[id(code)] = (code, None if file is None else file.noted(code))
    return found[1]


class Instrumented:
    """Functions that have the code with notes, for as long as it is entered.

    Args:
        observer: is told about the reads.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._own: dict[types.FunctionType, types.CodeType] = {}
        self._keys: dict[str, list[types.FunctionType]] = {}
        self.without_source: dict[types.FunctionType, None] = {}
        self._refused: dict[types.CodeType, str] = {}
        self._refusal: CaptureError | None = None
        self._entered = self._watches = False

    def refuse(self, function: types.FunctionType, text: str) -> None:
        """Let no call of a function pass: what it changes would not be seen.

        Args:
            text: says so.
        """
        self._refused[function.__code__] = text
        if self._entered:
            self._watch()

    def _watch(self) -> None:
        if self._watches or not self._refused:
            return
        if sys.getprofile() is not None:  # one of a profiler's, in C, could not be put back
            raise _refusal(next(iter(self._refused.values())))
        self._watches = True
        sys.setprofile(self._watch_calls)

    def _watch_calls(self, frame: types.FrameType, event: str, _: object) -> None:
        text = self._refused.get(frame.f_code) if event == "call" else None
        if text is not None:
            self._refusal = _refusal(text)
            raise self._refusal

    def add(self, function: types.FunctionType) -> bool:
        """Give a function its notes; False if there is no source to take them from."""
        if function in self._own:
            return True
        if function in self.without_source:
            return False
        code = function.__code__
        if _key_of(code):  # made by a function with notes
            return True
        noted = noted_code(code)
        if noted is None or noted.co_freevars != code.co_freevars:
            self.without_source[function] = None
            return False
        self._own[function] = code
        function.__code__ = noted
        self._keys.setdefault(_key_of(noted), []).append(function)
        return True

    def entered(self, key: str) -> list[types.FunctionType]:
        """The functions of which a note that one begins may be; none where the step has made it."""
        return self._keys.get(key, [])

    def key_of(self, function: types.FunctionType) -> str:
        """The key that a function with notes enters with."""
        return _key_of(function.__code__)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """The context of the observer's own work outside of a note: what that asks an object may run code with notes."""
        before, RECEIVER.busy = RECEIVER.busy, True
        try:
            yield
        finally:
            RECEIVER.busy = before

    @property
    def functions(self) -> dict[types.FunctionType, types.CodeType]:
        """The functions that have notes, with their own code."""
        return self._own

    def __enter__(self) -> Instrumented:
        try:
            self._watch()
        except CaptureError:
            self._put_back()
            raise
        self._entered = True
        self._before = RECEIVER.observer, RECEIVER.thread
        RECEIVER.observer, RECEIVER.thread = self._observer, threading.get_ident()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._watches:
            sys.setprofile(None)
        self._entered = self._watches = False
        RECEIVER.observer, RECEIVER.thread = self._before
        self._put_back()
        if self._refusal is not None and kind is None:  # the step has caught it
            raise self._refusal

    def _put_back(self) -> None:
        for function, code in self._own.items():
            function.__code__ = code


def _key_of(code: types.CodeType) -> str:
    return next((one for one in code.co_consts if type(one) is str and one.startswith(ENTERED)), "")


def _refusal(text: str) -> CaptureError:
    return CaptureError(
        f"the step\n  cannot be captured: {text}.\n  Fix: put the program into a file, so that its lines can be read."
    )
