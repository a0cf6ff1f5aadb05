"""Old import names: the same objects, with one warning each."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import torch_compat.moved
from torch_compat.step.optimizers.param_group import GroupReader
from xlatrain import moved

ROOT = Path(__file__).resolve().parents[2]
MODULES = {**moved.MODULES, **torch_compat.moved.MODULES}


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that ``name`` has been imported."""
    for known in [one for one in sys.modules if one == name or one.startswith(name + ".")]:
        monkeypatch.delitem(sys.modules, known)


@pytest.mark.parametrize("old", MODULES)
def test_a_module_under_its_old_name(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = MODULES[old]
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module(old.rpartition(".")[0])
    without(old, monkeypatch)
    with pytest.warns(DeprecationWarning, match=rf"^{old} is now {new};") as found:
        assert importlib.import_module(old) is importlib.import_module(new)
    assert len(found) == 1
    assert found[0].filename == importlib.__file__  # who imports it
    with warnings.catch_warnings(action="error"):
        importlib.import_module(old)
    assert sys.modules[new].__name__ == new
    assert sys.modules[new].__spec__.name == new  # pyright: ignore[reportOptionalMemberAccess]


def test_what_is_below_a_package_that_moved() -> None:
    with pytest.warns(DeprecationWarning, match="xlatrain.sharding.rules is now xlatrain.mesh.sharding.rules"):
        from xlatrain.sharding.rules import ShardingRules  # pyright: ignore[reportMissingImports]
    from xlatrain.mesh.sharding import ShardingRules as Now

    assert ShardingRules is Now
    for missing in ("xlatrain.sharding.nothing", "xlatrain.nothing", "torch_compat.functional.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(missing)


def test_no_module_of_today_is_hidden() -> None:
    for old in MODULES:
        path = ROOT / old.replace(".", "/")
        assert not path.with_suffix(".py").exists(), old
        assert not (path / "__init__.py").exists(), old


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in moved.NAMES.items() for name in names])
def test_a_name_in_its_old_module(module: str, name: str) -> None:
    home, _, attribute = moved.NAMES[module][name].rpartition(".")
    with warnings.catch_warnings(action="ignore"):
        found = importlib.import_module(module)
        vars(found).pop(name, None)
    with pytest.warns(DeprecationWarning, match=rf"\.{name} is now {home}.{attribute};") as said:
        assert getattr(found, name) is getattr(importlib.import_module(home), attribute)
    assert len(said) == 1
    assert said[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        getattr(found, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = found.no_such_name


def test_a_function_whose_module_has_taken_its_place() -> None:
    import torch

    from xlatrain.bridge.capture import capture

    with pytest.warns(DeprecationWarning, match="is now xlatrain.bridge.capture.capture.capture;"):
        captured: Any = capture(torch.sin, torch.ones(2))  # pyright: ignore[reportCallIssue]
    assert [str(one) for one in captured.outputs] == ["float32[2]"]


def test_functions_of_meshes_stay_where_they_were() -> None:
    import xlatrain.mesh
    import xlatrain.mesh.mesh

    with warnings.catch_warnings(action="error"):
        for name in xlatrain.mesh.__all__:
            assert getattr(xlatrain.mesh, name) is getattr(xlatrain.mesh.mesh, name)
    with pytest.raises(AttributeError, match="nothing"):
        _ = xlatrain.mesh.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_an_old_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class path as a checkpoint of the release before holds it."""
    text = pickle.dumps(GroupReader, protocol=0).replace(b"torch_compat.step.optimizers", b"torch_compat.functional.optimizers")
    assert b"torch_compat.functional.optimizers.param_group" in text
    without("torch_compat.functional.optimizers", monkeypatch)
    with pytest.warns(DeprecationWarning, match="torch_compat.functional.optimizers.param_group is now"):
        assert pickle.loads(text) is GroupReader


def test_importing_the_packages_warns_of_nothing() -> None:
    code = "import sys, xlatrain, torch_compat; assert not {'torch', 'jax'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
