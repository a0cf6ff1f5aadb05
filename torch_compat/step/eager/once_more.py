"""A step that raised before its program ran, run eagerly once more: what it does before it raises is kept, as in stock."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch_compat.step.eager.in_place_lines import InPlaceLines, is_of_writes_in_place
from xlatrain.bridge.errors import user_line

_OURS = tuple(f"{Path(__file__).resolve().parents[3] / name}{os.sep}" for name in ("torch_compat", "xlatrain"))


_T = TypeVar("_T")


def once_more(error: Exception, eagerly: Callable[[], _T]) -> _T:
    """The outcome of ``eagerly()``, a step that raised ``error``, of which nothing is left.

    Raises:
        Exception: what it raises now; ``error`` itself where that says more.
    """
    try:
        # A mode of torch's is seen by tensor subclasses: only for the error that it explains.
        with (written := InPlaceLines()) if is_of_writes_in_place(error) else contextlib.nullcontext():
            return eagerly()
    except Exception as again:
        if isinstance(error, type(again)) and _is_check_of_ours(error):
            raise error from None
        for note in getattr(error, "__notes__", ()) or (written.notes(again) if is_of_writes_in_place(error) else ()):
            again.add_note(note)
        _part(again, error)
        raise  # with the chain that the user's code gave it


def raised(error: Exception) -> str:
    """The exception of a step as the reason of a fallback: its class, its first line, and the user's line."""
    text, where = str(error).strip().partition("\n")[0], user_line(traceback.extract_tb(error.__traceback__))
    return f"the step raises {type(error).__name__}{f': {text}' if text else ''}{f' ({where})' if where else ''}"


def _part(again: BaseException, error: Exception) -> None:
    """Take ``error`` out of what ``again``, which was raised while it was handled, came of."""
    one: BaseException | None = again
    while one is not None and one is not error:
        if one.__context__ is error:
            one.__context__ = None
        one = one.__context__


def _is_check_of_ours(error: Exception) -> bool:
    """Whether an error of a capture says more than what the op raises: torch's own, of fake tensors, says less."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_OURS)
