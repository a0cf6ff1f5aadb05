"""The line that a run says after its first step, and how a Trainer and its strategy show themselves."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.run.report import ExecutorLog

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "max_epochs": 1}


class Net(LightningModule):
    """A net of one layer.

    Args:
        writes: whether its step writes a file, which no compiled step can.
        fails: whether its step raises.
    """

    def __init__(self, *, writes: Path | None = None, fails: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.writes, self.fails = writes, fails

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.fails:
            raise ValueError("the user's own")
        loss = self.layer(batch[0]).mean()
        if self.writes is not None:
            self.writes.write_bytes(loss.detach().numpy().tobytes())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("v", self.layer(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=8)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.split(":")[0] in ("training", "validate")]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize("bar", [False, True])
def test_compiled(told: pytest.LogCaptureFixture, bar: bool) -> None:
    trainer = Trainer(devices=4, strategy="fsdp", enable_progress_bar=bar, **QUIET)
    assert repr(trainer).startswith("<Trainer: <FSDPStrategy: no mesh yet>, precision 32-true; nothing has run")
    net = Net()
    trainer.fit(net, data(), data())
    trainer.validate(net, data())
    trainer.validate(net, data())  # says nothing new
    first, second = said(told)
    assert first.startswith("training: compiled · 4 CPU devices · fsdp 4 · first step in ")
    assert second.startswith("validate: compiled · 4 CPU devices · fsdp 4")
    assert repr(trainer.strategy) == "<FSDPStrategy: 4 CPU devices · fsdp 4>"
    assert repr(trainer).endswith("precision 32-true; validate finished, global_step 1>")


def test_eager(told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    Trainer(devices=1, enable_progress_bar=False, **QUIET).fit(Net(), data())
    assert said(told) == ["training: EAGER on the host, not compiled · XLATRAIN_EXECUTOR=eager · docs/why_eager.md"]


def test_the_report_of_a_run_that_failed_before_anything_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_REPORT", str(tmp_path / "report.json"))
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    with pytest.raises(ValueError, match="the user's own"):
        Trainer(devices=1, enable_progress_bar=False, **QUIET).fit(Net(fails=True), data())
    assert json.loads((tmp_path / "report.json").read_text())["runs"][-1]["executor"] == "none"


@pytest.mark.filterwarnings("ignore:Steps run eagerly")
def test_the_report_keeps_the_whole_reason_and_the_line_the_short_one(
    told: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLATRAIN_REPORT", str(tmp_path / "report.json"))
    Trainer(devices=1, enable_progress_bar=False, **QUIET).fit(Net(writes=tmp_path / "loss"), data())
    reason = json.loads((tmp_path / "report.json").read_text())["runs"][-1]["fallback"]
    assert "Fix:" in reason and "Fix:" not in ExecutorLog(fallback=reason).short_reason
    (line,) = said(told)
    found = re.fullmatch(r"training: EAGER on the host, not compiled · (\S+:\d+: .+): (.+) · docs/why_eager.md", line)
    assert found and found[1] in reason and found[2] in reason


def test_a_compile_that_takes_long_is_told(told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_compat.step.compile_notice._SILENT_S", 1e-3)  # which none is quicker than
    Trainer(accelerator="cpu", devices=1, enable_progress_bar=False, **QUIET).fit(Net(), data())
    lines = [message for message in told.messages if message.startswith("compiling a step")]
    assert lines and all(line.endswith(" s so far") for line in lines)
    assert told.messages.index(lines[0]) < told.messages.index(said(told)[0])
