"""The wheel: it has all that runs from a checkout, and nothing of the checkout is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import lightning.pytorch as pl, torch_compat, xlatrain
from lightning.pytorch.demos.boring_classes import BoringModel
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(max_steps=1, accelerator="cpu", devices=2, **options)
trainer.fit(BoringModel())
print("step", trainer.global_step, xlatrain.__file__, torch_compat.__file__)
"""


@pytest.mark.slow
def test_a_script_runs_from_the_wheel_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build writes into its source
    for name in ("xlatrain", "torch_compat", "tpu_scripts", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(pip, check=True, timeout=300, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    (tmp_path / "script.py").write_text(SCRIPT)
    # found before the checkout, which the environment of the tests has installed in place
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = run("torch_compat", "script.py")
    assert f"step 1 {installed / 'xlatrain'}" in printed and str(installed / "torch_compat") in printed
    assert "gpt.py" in run("xlatrain.cli", "examples")
    assert (installed / "xlatrain" / "py.typed").exists() and (installed / "torch_compat" / "py.typed").exists()
