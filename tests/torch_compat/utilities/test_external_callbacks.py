"""Callbacks of installed packages: found when a package comes, gone when it goes, and looked up only then."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import types
from pathlib import Path

import pytest

from torch_compat.callbacks import Callback
from torch_compat.utilities.external_callbacks import external_callbacks

GROUP = "lightning.pytorch.callbacks_factory"


class _Added(Callback):
    pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, for packages."""
    factories = types.ModuleType("factories_of_a_test")
    factories.__dict__.update(one=_Added, two=lambda: [_Added(), _Added()], none=list)
    monkeypatch.setitem(sys.modules, factories.__name__, factories)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def _install(folder: Path, name: str, factory: str) -> Path:
    package = folder / f"{name}-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = factories_of_a_test:{factory}\n")
    return package


def test_of_packages_that_come_and_go(folder: Path) -> None:
    assert external_callbacks(GROUP) == []
    one = _install(folder, "first", "one")
    assert [type(found) for found in external_callbacks(GROUP)] == [_Added]
    _install(folder, "second", "two")
    _install(folder, "third", "none")
    assert len(external_callbacks(GROUP)) == 3
    assert external_callbacks("lightning.fabric.callbacks_factory") == []
    shutil.rmtree(one)
    assert len(external_callbacks(GROUP)) == 2


def test_packages_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(folder, "first", "one")
    first, second = external_callbacks(GROUP), external_callbacks(GROUP)
    assert first != second  # callbacks of their own
    read: list[str] = []
    monkeypatch.setattr(importlib.metadata.PathDistribution, "read_text", lambda self, name: read.append(name))
    assert len(external_callbacks(GROUP)) == 1
    assert read == []
