"""Files of our own in the folder of compiled programs."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from xlatrain.xla import kept_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(kept_files, "_folder", tmp_path)
    kept_files._of_process.cache_clear()
    yield tmp_path
    kept_files._of_process.cache_clear()


def test_what_was_written_is_read(folder: Path) -> None:
    key = kept_files.key_of("a", "b")
    assert kept_files.read("kind", key) is None
    kept_files.write("kind", key, b"contents")
    assert kept_files.read("kind", key) == b"contents"
    assert kept_files.read("other", key) is None
    assert [path.name for path in folder.iterdir()] == [f"xlatrain-kind-{key}"]  # nothing else is left


def test_each_part_of_the_key_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {kept_files.key_of("a", "b"), kept_files.key_of("ab"), kept_files.key_of("b", "a"), kept_files.key_of("a", "b", "")}
    source = folder / "package" / "module.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    changes = [
        lambda: monkeypatch.setattr(jax, "__version__", "0.0.1"),
        lambda: monkeypatch.setattr(importlib.metadata, "version", lambda name: f"0.0.1 of {name}"),
        lambda: monkeypatch.setattr(sys, "version", "3.99"),
        lambda: monkeypatch.setattr(sys.modules["xlatrain"], "__path__", [str(source.parent)]),
        lambda: source.write_text("x = 12\n"),
        lambda: os.utime(source, ns=(1, 1)),
    ]
    for number, change in enumerate(changes, len(keys) + 1):
        change()
        kept_files._of_process.cache_clear()
        keys.add(kept_files.key_of("a", "b"))
        assert len(keys) == number


@pytest.mark.parametrize("damage", [b"", b"short", bytes(40)], ids=["empty", "cut off", "changed"])
def test_a_damaged_file_is_told_and_made_anew(folder: Path, damage: bytes) -> None:
    key = kept_files.key_of("a")
    kept_files.write("kind", key, b"contents")
    (path,) = folder.iterdir()
    path.write_bytes(damage)
    with pytest.warns(UserWarning, match="is of no use, and is made anew"):
        assert kept_files.read("kind", key) is None
    assert not path.exists()
    kept_files.write("kind", key, b"contents")
    assert kept_files.read("kind", key) == b"contents"


def test_processes_that_write_the_same_at_once_leave_a_whole_file(folder: Path) -> None:
    script = (
        "import pathlib, sys; from xlatrain.xla import kept_files; kept_files.use(pathlib.Path(sys.argv[1]))\n"
        "for _ in range(200):\n"
        "    kept_files.write('kind', 'key', bytes(100_000))\n"
        "    assert kept_files.read('kind', 'key') == bytes(100_000)"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(folder)]
    processes = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) for _ in range(3)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0, 0]
    assert [path.name for path in folder.iterdir()] == ["xlatrain-kind-key"]


def test_a_folder_that_is_gone_does_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for none in (folder / "missing", None):
        monkeypatch.setattr(kept_files, "_folder", none)
        kept_files.write("kind", "key", b"contents")
        assert kept_files.read("kind", "key") is None
