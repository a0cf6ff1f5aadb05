"""``xlatrain fit`` and its sisters, as a user runs them; what `LightningCLI` itself does is compared in tests/parity."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import warm
from tests.multiprocess.pod import ROOT

pytestmark = pytest.mark.slow

MODELS = ROOT / "tests" / "parity" / "scripts"
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]


def xlatrain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    found = f"{ROOT}{os.pathsep}{MODELS}"
    environment = {**os.environ, "PYTHONPATH": found, "XLATRAIN_REPORT": str(folder / "report.json")}
    return warm.run(warm.OURS, ["-m", "xlatrain.cli", *arguments], env=environment, timeout=300, cwd=folder)


def test_fit_from_a_file_then_test_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "seed_everything: 7\n"
        "trainer: {max_epochs: 1, devices: 2, strategy: {class_path: lightning.pytorch.strategies.FSDPStrategy}}\n"
        "model: {class_path: cli_models.WiderNet, init_args: {factor: 3}}\n"
        "data: cli_models.Data\n"
    )
    done = xlatrain(tmp_path, "fit", "--config", "config.yaml", *QUIET)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "lightning_logs" / "version_0"
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["trainer"]["strategy"]["class_path"] == "lightning.pytorch.strategies.FSDPStrategy"
    assert saved["model"]["init_args"]["factor"] == 3
    (entry,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert (entry["stage"], entry["executor"], entry["mesh"]) == ("fit", "compiled", {"data": 1, "fsdp": 2})

    (checkpoint,) = (run / "checkpoints").iterdir()
    data = ["--data", "cli_models.Data", f"--ckpt_path={checkpoint}", *QUIET]
    done = xlatrain(tmp_path, "test", "--model", "cli_models.WiderNet", *data)
    assert done.returncode == 0, done.stderr
    assert "test_loss" in done.stdout
    # The checkpoint's own factor, 3, was used: with the class's default the weights would not have fitted.
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0]["stage"] == "test"


def test_a_mistake_is_named_and_ends_with_status_2(tmp_path: Path) -> None:
    done = xlatrain(tmp_path, "fit", "--model", "cli_models.Nett")
    assert done.returncode == 2
    assert "module 'cli_models' has no attribute 'Nett'" in done.stderr
