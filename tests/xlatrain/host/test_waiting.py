"""Lines while a compiler says nothing."""

from __future__ import annotations

import threading

import pytest

from xlatrain.host import waiting


def test_what_takes_long_is_told() -> None:
    lines: list[str] = []
    twice = threading.Event()

    def progress(text: str) -> None:
        lines.append(text)
        if len(lines) == 2:
            twice.set()

    with waiting.told("compiling", progress, 0.01):
        assert twice.wait(60)
    assert lines[0].startswith("compiling goes on: ") and lines[0].endswith(" s so far")


def test_what_is_quick_is_not_told() -> None:
    lines: list[str] = []
    with pytest.raises(KeyError), waiting.told("compiling", lines.append):
        raise KeyError
    assert not lines and "xlatrain-waiting" not in {thread.name for thread in threading.enumerate()}
