"""Tracebacks of what a run raises: the frames of the user's own code and the one that raised, not those of captures between them.

``XLATRAIN_VERBOSE=1`` leaves tracebacks as they are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import jax
import torch

from xlatrain.bridge.errors import BridgeError, is_user_file
from xlatrain.checkpoint.library_output import VERBOSE, is_verbose

_NOTE = f"Frames of Trainer, torch and JAX are left out; {VERBOSE}=1 shows them."
_OF_JAX = "--------------------\nFor simplicity, JAX has removed its internal frames"
_PLUMBING = tuple(str(Path(str(module.__file__)).parent) for module in (torch, jax)) + tuple(
    str(Path(__file__).resolve().parents[2] / name) for name in ("torch_compat", "xlatrain")
)
"""Packages through which a captured step goes, whose errors come of others."""


P = ParamSpec("P")
T = TypeVar("T")


def short_tracebacks(call: Callable[P, T]) -> Callable[P, T]:
    """``call``, an entry of the user's, whose errors are shortened (:func:`shorten`)."""

    @functools.wraps(call)
    def shortened(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise  # without an entry of its own

    return shortened


def shorten(error: BaseException) -> None:
    """Leave of the traceback of ``error`` what a user can do something about; the exception stays the same.

    Without a frame of the user's own only errors that tell what is wrong lose frames: others may be faults of ours.
    """
    if is_verbose() or not isinstance(error, Exception):
        return
    if _shortened(error):
        error.add_note(_NOTE)


def _shortened(error: BaseException) -> bool:
    """Shorten an error and those that it came of; whether anything was left out."""
    entries = _entries(error.__traceback__)
    if not entries:
        return False
    last = entries[-1]
    kept = [entry for entry in entries if is_user_file(_file(entry))]
    notes = getattr(error, "__notes__", [])
    told = type(error).__module__.partition(".")[0] in ("torch_compat", "xlatrain") or any(map(_names_line, notes))
    if not kept and not told:
        return False
    if last not in kept and not (kept and isinstance(error, BridgeError)):
        kept.append(last)
    error.__traceback__ = _joined(kept)
    if notes:
        error.__notes__ = [note for note in notes if not note.startswith(_OF_JAX) and not (kept[:-1] and _names_line(note))]
    source = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if source is not None:
        # What the runtime says (out of memory, lost devices) stays: callers look at it.
        if _file(last).startswith(_PLUMBING) and not isinstance(source, jax.errors.JaxRuntimeError):
            error.__cause__, error.__suppress_context__ = None, True
            return True
        _shortened(source)
    return len(kept) < len(entries)


def _names_line(note: str) -> bool:
    """Whether a note of ours says where in the user's code it happened."""
    return note.startswith("in ") and note.partition(": ")[0].rpartition(":")[2].isdigit()


def _file(entry: types.TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _entries(traceback: types.TracebackType | None) -> list[types.TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _joined(entries: list[types.TracebackType]) -> types.TracebackType | None:
    joined: types.TracebackType | None = None
    for entry in reversed(entries):
        joined = types.TracebackType(joined, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return joined
