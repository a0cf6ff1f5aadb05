"""Which source lines are the user's own, and what errors hold."""

from __future__ import annotations

import json
import os
import sysconfig
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from xlatrain.bridge import errors
from xlatrain.bridge.errors import CaptureError, is_user_file, let_go


@pytest.mark.parametrize(
    "path",
    [
        __file__,
        "/work/project/train.py",
        "train.py",
        "/tmp/ipykernel_4711/123456.py",  # a cell of a notebook
        "<ipython-input-3-abcdef>",
        "<stdin>",
        "<python-input-0>",
    ],
)
def test_what_a_user_wrote(path: str) -> None:
    assert is_user_file(path)


@pytest.mark.parametrize(
    "path",
    [
        str(torch.__file__),
        str(np.__file__),
        json.__file__,
        errors.__file__,
        os.path.join(sysconfig.get_paths()["purelib"], "anything.py"),
        "/home/me/.local/lib/python3.11/site-packages/torch/_tensor.py",  # below another environment, or the user's own
        "/usr/lib/python3/dist-packages/numpy/core/numeric.py",
        "<frozen importlib._bootstrap>",
        "<string>",
        "<eval_with_key>.7",
    ],
)
def test_what_is_installed_or_made(path: str) -> None:
    assert not is_user_file(path)


def test_what_an_installer_wrote_beside_the_users_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pip install --target here``: what a package's RECORD names is no user's, what lies beside it is."""
    folder = tmp_path / "tool-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
    (folder / "RECORD").write_text('tool/__init__.py,sha256=abc,12\n"tool/a, b.py",,\ntool-1.0.dist-info/RECORD,,\n')
    linked = tmp_path.parent / f"{tmp_path.name}-linked"
    linked.symlink_to(tmp_path)
    monkeypatch.syspath_prepend(str(linked))
    assert not is_user_file(str(tmp_path / "tool" / "__init__.py"))
    assert not is_user_file(str(linked / "tool" / "a, b.py"))
    assert is_user_file(str(tmp_path / "tool" / "mine.py"))
    assert is_user_file(str(tmp_path / "train.py"))


def test_a_librarys_step_is_named_by_its_line_and_the_users_that_led_there(tmp_path: Path) -> None:
    library = Path(torch.__file__).parents[1] / "some_library" / "model.py"
    ours, inside_torch = errors.__file__, torch.nn.modules.module.__file__
    script = traceback.FrameSummary(str(tmp_path / "train.py"), 3, "main", line="model.fit(data)")
    step = traceback.FrameSummary(str(library), 7, "training_step", line="if mask.any():")
    facade, below = (traceback.FrameSummary(one, 1, "run", line="call()") for one in (ours, inside_torch))
    led = errors.user_line(traceback.StackSummary.from_list([script, facade, step, below, facade]))
    assert led == f"{library}:7: if mask.any(): (which {tmp_path / 'train.py'}:3: model.fit(data) led to)"
    assert errors.user_line(traceback.StackSummary.from_list([facade, step, below])) == f"{library}:7: if mask.any():"
    own = [script, facade, script, step, below]  # the user's step calls the library
    assert errors.user_line(traceback.StackSummary.from_list(own)) == f"{tmp_path / 'train.py'}:3: model.fit(data)"
    assert errors.user_line(traceback.StackSummary.from_list([facade, below])) is None


def test_an_error_that_is_let_go_keeps_nothing_alive() -> None:
    class Held:
        pass

    def failing(seen: list[weakref.ref[object]]) -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise CaptureError("not compiled")

    seen: list[weakref.ref[object]] = []
    try:
        failing(seen)
    except CaptureError as error:
        let_go(error)
        seen += [weakref.ref(error)]
        assert seen[0]() is None
    assert seen[1]() is None
