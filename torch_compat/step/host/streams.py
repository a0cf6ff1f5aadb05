"""The streams of a process while a step is captured: what the user's code writes is written after each step."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import lightning_utilities.core.rank_zero as rank_zero

from torch_compat.step.host.calls import HostCalls
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.later_text import LaterText, has_marks
from torch_compat.step.host.said import recording
from xlatrain.bridge.errors import is_user_file

_OURS = f"{Path(__file__).parents[2]}/"
_PASSES_ON = (rank_zero.__file__, "/tqdm/std.py", "/pprint.py", f"{_OURS}step/guards/called_functions.py", __file__)
"""Files of functions that write what they are given."""


def is_asked_by_user(frame: Any) -> bool:
    """Whether the user's own code asks to write, also through a function that passes it on, such as ``trainer.print``."""
    while frame is not None and _passes_on(frame.f_code):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _passes_on(code: Any) -> bool:
    return code.co_filename.endswith(_PASSES_ON) or (code.co_name == "print" and code.co_filename.startswith(_OURS))


class RecordedStream:
    """Stand-in of a stream of text while a step is captured.

    Args:
        name: of the stream in :mod:`sys`.
        calls: where what the user's code writes in this thread is noted.
    """

    def __init__(self, name: str, calls: HostCalls) -> None:
        self._name = name
        self._stream = getattr(sys, name)
        self._calls = calls
        self._thread: int | None = threading.get_ident()

    @recording
    def write(self, text: str) -> int:
        """Write ``text`` after the step where the user's code wants it; now where a library does."""
        if threading.get_ident() != self._thread:
            return self._stream.write(text)
        if is_asked_by_user(sys._getframe(1)):
            written = self._calls.record(_write, (self._name, text), text="write")
            if type(text) is LaterText:
                return HostFuture(self._calls, written, like=0)  # pyright: ignore[reportReturnType]
        elif has_marks(text):
            self._calls.refuse(
                "a library writes a value of the step to a stream", "print it, or write it in a hook such as on_train_batch_end"
            )
        else:
            return self._stream.write(text)
        return len(text)

    def end(self) -> None:
        """The capture is over: who has kept this writes to the stream itself."""
        self._thread = None

    def writelines(self, lines: Any) -> None:
        """Write each of ``lines``, see :meth:`write`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write(name: str, text: str) -> int:
    return getattr(sys, name).write(text)
