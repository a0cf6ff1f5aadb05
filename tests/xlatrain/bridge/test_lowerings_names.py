"""Every name given to ``@lowers`` in the op families is an op of torch: a misspelt one would never be called."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import xlatrain.bridge.lower.lowerings
from xlatrain.bridge.capture.decompositions import decomposition_table
from xlatrain.bridge.lower.registry import lowered_ops, lowers, resolve

_FOLDER = Path(xlatrain.bridge.lower.lowerings.__file__).parent


def _names(source: str) -> set[str]:
    """The literal names in ``@lowers(…)`` decorators of ATen ops."""
    calls = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lowers"
    ]
    values = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    return {value for value in values if value.startswith(("aten.", "prims."))}


@pytest.mark.skipif(Version(torch.__version__).release < (2, 13), reason="older versions lack some of the ops")
@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_names_exist(path):
    unknown = {name for name in _names(path.read_text()) if resolve(name) is None}
    assert not unknown


def test_no_op_that_captures_decompose_has_a_lowering():
    assert not lowered_ops() & decomposition_table.decomposition_table().keys()


def test_an_op_cannot_have_two_lowerings():
    with pytest.raises(ValueError, match=r"aten\.add\.Tensor has two lowerings"):
        assert torch.ops.aten.add.Tensor in lowered_ops()
        lowers("aten.add.Tensor")(lambda x, y: x)


def test_the_table_of_decompositions_has_torchs_composites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though torch looks for those of all namespaces once, not once in each."""
    table = decomposition_table._table.__wrapped__  # anew: libraries of other tests have brought ops with them
    found = table().keys()
    monkeypatch.setattr(decomposition_table, "_finding_composites_once", contextlib.nullcontext)
    assert table().keys() == found
