"""``xlatrain explain``, as a user runs it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import warm
from tests.multiprocess.pod import ROOT
from torch_compat.explain import Explanation

SCRIPT = """
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        out = self.layer(batch[0])
        return out.sum() + torch.unique(out.detach().round()).sum()
    def test_step(self, batch, batch_idx):
        self.log("mean", self.layer(batch[0]).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

loader = DataLoader(TensorDataset(torch.randn(640, 4)), 8)
trainer = pl.Trainer(max_epochs=50, accelerator="cpu", devices=2, enable_progress_bar=False, enable_model_summary=False)
net = Net()
trainer.fit(net, loader)
trainer.test(net, loader)
print("global step", trainer.global_step)
"""


def explain(folder: Path, source: str, *options: str) -> tuple[int, dict, str]:
    (folder / "script.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLATRAIN_EXECUTOR": "auto"}
    command = [
        "-c",
        "import sys; from torch_compat.explain import COMMAND; sys.exit(COMMAND.main(sys.argv[1:]))",
        "--json",
        *options,
        "script.py",
    ]
    done = warm.run(warm.OURS, command, env=environment, timeout=300, cwd=folder)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_each_run_has_its_executor_and_the_first_reason(tmp_path: Path) -> None:
    status, told, printed = explain(tmp_path, SCRIPT, "--batches", "3")
    assert status == 1 and told["error"] is None
    fit, test = told["runs"]
    assert (fit["stage"], fit["executor"]) == ("fit", "eager")
    assert "script.py:11" in fit["where"] and "torch.unique" in fit["where"]
    assert "output shape depends on the values" in fit["reason"] and "torch.where" in fit["fix"]
    assert (test["stage"], test["executor"], test["mesh"]["data"]) == ("test", "compiled", 2)
    assert "global step 3" in printed  # three batches of one epoch
    assert not (tmp_path / "lightning_logs").exists()


@pytest.mark.slow
def test_a_script_that_fails_is_told_with_what_ran_before(tmp_path: Path) -> None:
    status, told, _ = explain(tmp_path, SCRIPT.replace("trainer.test(net, loader)", "raise KeyError('mine')"))
    assert status == 2
    assert [run["stage"] for run in told["runs"]] == ["fit"]
    assert told["error"].splitlines()[-1] == "KeyError: 'mine'"


def test_an_explanation_reads_in_lines() -> None:
    run = {"stage": "fit", "executor": "eager", "mesh": {"data": 1}, "variants": 0, "recompilations": [], "on_host": {}}
    text = "training_step changes self.x, which a compiled step would do only once. Fix: keep it in a buffer."
    assert str(Explanation.of({**run, "fallback": text})).splitlines() == [
        "fit: EAGER on the host",
        "  reason: training_step changes self.x, which a compiled step would do only once",
        "  fix:    keep it in a buffer",
    ]
    compiled = {
        **run,
        "executor": "compiled",
        "variants": 2,
        "fallback": None,
        "recompilations": ["batch[0]: float32[8] → float32[4]"],
        "on_host": {"validation_step": "net.py:7: loops. Fix: use a hook."},
    }
    assert str(Explanation.of(compiled)).splitlines() == [
        "fit: compiled · one device · 2 programs",
        "  compiled again: batch[0]: float32[8] → float32[4]",
        "validation_step: EAGER on the host",
        *("  where:  net.py:7", "  reason: loops", "  fix:    use a hook"),
    ]
