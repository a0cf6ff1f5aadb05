"""Something to do when a module is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from torch_compat.utilities.post_import import when_imported

SOURCE = "import waited_for.other\nVALUE = 1\nif waited_for.other.FAILS: raise RuntimeError('on purpose')\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package ``waited_for``; what imports left is forgotten."""
    folder = tmp_path / "waited_for"
    folder.mkdir()
    for name, text in {"__init__": "", "other": "FAILS = False\n", "module": SOURCE}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield folder
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "waited_for"]:
        del sys.modules[name]


def test_the_action_is_taken_when_the_module_is_there(package: Path) -> None:
    seen: list[int] = []

    def note(module: ModuleType) -> None:
        seen.append(module.VALUE)

    finders = list(sys.meta_path)
    for _ in range(2):
        when_imported("waited_for.module", note)
    importlib.import_module("waited_for")
    assert seen == [] and "waited_for.module" not in sys.modules
    module = importlib.import_module("waited_for.module")
    assert seen == [1] and sys.meta_path == finders
    assert type(module.__loader__) is type(sys.modules["waited_for"].__loader__) is type(module.__spec__.loader)  # pyright: ignore[reportOptionalMemberAccess]
    when_imported("waited_for.module", note)  # now it is
    assert seen == [1, 1]


def test_an_import_that_failed_is_waited_for_again(package: Path) -> None:
    seen: list[ModuleType] = []
    when_imported("waited_for.module", seen.append)
    other = importlib.import_module("waited_for.other")
    other.FAILS = True
    with pytest.raises(RuntimeError, match="on purpose"):
        importlib.import_module("waited_for.module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("waited_for.nothing")
    assert seen == []
    other.FAILS = False
    assert seen == [importlib.import_module("waited_for.module")]
    when_imported("waited_for.later", seen.append)
    with pytest.raises(ModuleNotFoundError, match=r"waited_for\.later"):
        importlib.import_module("waited_for.later")
    (package / "later.py").write_text("")
    importlib.invalidate_caches()
    assert seen[1:] == [] and [importlib.import_module("waited_for.later")] == seen[1:]
