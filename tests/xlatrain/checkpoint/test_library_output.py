"""What libraries' threads say late, about what an error has said already."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from xlatrain.checkpoint import library_output


def test_parts_that_fail_after_the_first_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: printed.append(str(what.exc_value)))
    monkeypatch.setenv(library_output.VERBOSE, "0")
    library_output.watch_reads()
    library_output.watch_reads()  # once is enough

    def late(error: Exception) -> None:
        what: Any = SimpleNamespace(exc_value=error, object=None)
        sys.unraisablehook(what)

    late(ValueError("Encountered error while reading array index: (slice(96, 128, 1),). See full TensorStore details"))
    late(RuntimeError("Event loop is closed"))
    late(ValueError("somebody else's"))
    assert printed == ["somebody else's"]
