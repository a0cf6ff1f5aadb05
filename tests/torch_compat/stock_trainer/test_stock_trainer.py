"""``xlatrain.lightning`` in processes of their own: what it refuses, and where it cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import compiling, warm

REPOSITORY = Path(__file__).parents[3]


def run(preloaded: tuple[str, ...], *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**compiling.environment(), "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    return warm.run(preloaded, command, env=environment, timeout=300, cwd=REPOSITORY)


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """Case → the text of the error that ``refused_script.py`` met."""
    done = run(warm.BOTH, str(Path(__file__).with_name("refused_script.py")))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


REFUSED = {
    "num_nodes": ("Trainer(num_nodes=2)", "python -m torch_compat"),
    "precision": ("Trainer(precision='16-mixed')", "choose one of '32-true', 'bf16-mixed'"),
    "loss": ("a loss that on_before_backward changes in place", "scale the loss in training_step"),
    "manual": ("manual_backward() outside of training_step", "python -m torch_compat"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused_is_named_with_what_to_use_instead(case: str, errors: dict[str, str]) -> None:
    for text in REFUSED[case]:
        assert text in errors[case]


@pytest.mark.slow
def test_signals_that_a_backend_ignores_stay_ignored(errors: dict[str, str]) -> None:
    assert errors["signals"] == "ignored"


def test_where_lightning_is_torch_compat_the_own_strategy_is_named() -> None:
    program = "import torch_compat; torch_compat.install()\nimport xlatrain.lightning\nxlatrain.lightning.MeshStrategy"
    done = run(warm.OURS, "-c", program)
    assert "ImportError: xlatrain.lightning is for stock Lightning's own Trainer" in done.stderr
    assert "Trainer(strategy='mesh')" in done.stderr


def test_without_lightning_the_extra_is_named(tmp_path: Path) -> None:
    program = "\n".join(
        [
            "import importlib.metadata as metadata",
            "def missing(name): raise metadata.PackageNotFoundError(name)",
            "metadata.version = missing",
            "from xlatrain.lightning import MeshStrategy",
        ]
    )
    done = run(warm.OURS, "-c", program)
    assert "ImportError: xlatrain.lightning needs stock Lightning" in done.stderr
    assert "pip install 'xlatrain[lightning]'" in done.stderr


def test_other_names_are_not_there() -> None:
    import xlatrain.lightning

    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        xlatrain.lightning.Trainer  # noqa: B018  pyright: ignore[reportAttributeAccessIssue]
    assert "lightning" not in os.sys.modules  # pyright: ignore[reportAttributeAccessIssue]
