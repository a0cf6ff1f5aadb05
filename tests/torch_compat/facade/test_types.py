"""Types that a user's editor and type checker see: of ``torch_compat``, and through Lightning's names by ``xlatrain stubs``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torch_compat.stock_names.stubs import COMMAND

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import lightning as L
import lightning.pytorch as pl
import pytorch_lightning as old
import torch_compat
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from pytorch_lightning.plugins import DDPPlugin


class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        self.log("loss", batch)
        return batch.mean()


callbacks = [EarlyStopping("loss"), pl.callbacks.ModelCheckpoint()]
trainer: torch_compat.Trainer = L.Trainer(max_epochs=3, accelerator="cpu", devices=8, strategy="fsdp", callbacks=callbacks)
trainer.fit(Model())
old.Trainer(max_epochs=1).fit(old.LightningModule())
L.Fabric(accelerator="cpu")
pl.Trainer(max_epoch=3)  # wrong
torch_compat.Trainer(accelerator=3)  # wrong
trainer.fit(3)  # wrong
L.pytorch.callbacks.ModelCheckpoint(save_topk=3)  # wrong
from lightning.pytorch.callbacks import EarlyStoping  # wrong
"""


@pytest.mark.slow
def test_wrong_arguments_are_errors_of_a_type_checker_where_lightning_is_not_installed(tmp_path: Path) -> None:
    assert COMMAND.main(["--output", str(tmp_path / "typings")]) == 0
    (tmp_path / "train.py").write_text(SCRIPT)
    # Folders of its own first, as a user's; torch and numpy from this environment, where Lightning is installed too.
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "pythonVersion": "3.11"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    found = {item["range"]["start"]["line"] for item in json.loads(done.stdout)["generalDiagnostics"]}
    assert found == {line for line, text in enumerate(SCRIPT.split("\n")) if text.endswith("# wrong")}, done.stdout


def test_stubs_of_others_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.pyi").write_text("x: int\n")
    assert COMMAND.main(["--output", str(tmp_path)]) == 2
    assert "was not made by this command" in capsys.readouterr().err
    assert (tmp_path / "lightning" / "__init__.pyi").read_text() == "x: int\n"
