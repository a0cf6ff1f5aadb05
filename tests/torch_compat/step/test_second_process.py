"""A second process of a script: its graph and its program are found on disk, wherever nothing that they depend on has changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from torch_compat.step import kept_graphs
from xlatrain.xla.told import OF_NO_PROGRAM

ROOT = Path(__file__).resolve().parents[3]

_SCRIPT = """
import sys
import lightning as L
import torch
import torch.nn.functional as F

class Module(L.LightningModule):
    def __init__(self, weight):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0, weight])
    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = F.dropout(F.gelu(layer(batch)), 0.25, training=self.training)
        loss = (FACTOR * batch * self.weights).pow(2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

class Losses(L.Callback):
    losses = []
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

traced = []
if "torch_compat" in sys.modules:
    import jax
    from xlatrain.bridge.capture import capture
    from xlatrain.bridge.lower import interpret
    original, lowered = capture._traced, interpret._call
    capture._traced = lambda *args: (traced.append("graph"), original(*args))[1]
    interpret._call = lambda *args, **kwargs: (traced.append("op"), lowered(*args, **kwargs))[1]
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: traced.append(name.split("/")[-1]))
L.seed_everything(0)
module = Module(WEIGHT)
data = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=4)
trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[Losses()])
trainer.fit(module, data)
print(*(f"{one:.6f}" for one in Losses.losses), "|", traced.count("graph"), "op" in traced,
    "jaxpr_to_mlir_module_duration" in traced)
"""


def run(folder: Path, *, weight: float = 2.0, factor: float = 1.0, stock: bool = False, **environment: str) -> tuple[str, str]:
    """The losses; and how many graphs were made, whether ops were traced, whether a program was lowered."""
    script = folder / "script.py"
    script.write_text(_SCRIPT.replace("WEIGHT", str(weight)).replace("FACTOR", str(factor)))
    of_the_suite = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_ENABLE_COMPILATION_CACHE")
    env = {name: value for name, value in os.environ.items() if name not in of_the_suite}
    env |= {"XLATRAIN_CACHE_DIR": str(folder / "cache"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    if stock:
        done = warm.run(warm.STOCK, [str(script)], env=env, timeout=300)
    else:
        command = [sys.executable, "-m", "torch_compat", str(script)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is of no use" not in done.stderr, done.stderr[-3000:]
    losses, traced = done.stdout.strip().splitlines()[-1].split(" | ")
    return losses, traced


def test_a_second_process_makes_no_graph(tmp_path: Path) -> None:
    expected, _ = run(tmp_path, stock=True)
    assert run(tmp_path) == (expected, "2 True True")  # the graph, and how many numbers a dropout draws
    assert run(tmp_path, XLATRAIN_REPORT=str(tmp_path / "report.json")) == (expected, "0 False False")
    other, _ = run(tmp_path, weight=5.0, factor=2.0, stock=True)
    assert other != expected
    assert run(tmp_path, weight=5.0, factor=2.0) == (other, "1 True True")
    assert run(tmp_path) == (expected, "0 False False")


def test_each_environment_variable_is_of_programs_or_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of which it is not sure that they change no program are a part of every key."""
    names = re.findall(r"^\| `(XLATRAIN_\w+)`", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE)
    assert set(names) > OF_NO_PROGRAM
    for name in names:
        monkeypatch.delenv(name, raising=False)
        without = kept_graphs.settings()
        monkeypatch.setenv(name, "another")
        assert (kept_graphs.settings() == without) == (name in OF_NO_PROGRAM), name
        monkeypatch.delenv(name)
