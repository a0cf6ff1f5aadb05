"""Findings of a compiled step's audits, and that they capture no second graph for a step that stays the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.step.capture import session
from xlatrain.bridge.capture import capture
from xlatrain.bridge.capture.capture import Capture


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.ReLU(inplace=True), nn.Linear(4, 1))
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Impure(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (time.perf_counter_ns() % 1000)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Capture]]:
    """Every graph that is captured."""
    made: list[Capture] = []
    finish = capture._finish

    def counted(*args: Any, **kwargs: Any) -> Capture:
        made.append(finish(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(capture, "_finish", counted)
    yield made


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The method of every run of a step's Python."""
    made: list[str] = []
    run = session.CaptureSession._run_once

    def counted(self: Any, attempt: Any, *args: Any) -> Any:
        made.append(attempt.name)
        return run(self, attempt, *args)

    monkeypatch.setattr(session.CaptureSession, "_run_once", counted)
    yield made


def twenty_batches() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(40, 4)), 2)


def trainer(tmp_path: Any) -> Trainer:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, **options)


def fit(module: LightningModule, tmp_path: Any) -> None:
    trainer(tmp_path).fit(module, twenty_batches())


def test_a_step_that_stays_the_same_is_captured_once(captures: list[Capture], tmp_path: Any) -> None:
    fit(Net(), tmp_path)  # 20 steps: audited before the second and the seventeenth
    assert len(captures) == 1


def test_a_step_that_changes_is_captured_again_and_named(captures: list[Capture], tmp_path: Any) -> None:
    with pytest.warns(UserWarning, match=r"does not do the same for every batch(?s:.*)at first `.*mul"):
        fit(Impure(), tmp_path)
    assert len(captures) == 2


def test_audits_that_a_step_has_stood_are_not_repeated_in_later_runs(runs: list[str], tmp_path: Any) -> None:
    module, run = Net(), trainer(tmp_path)
    counts = []
    for _ in range(3):
        runs.clear()
        run.predict(module, twenty_batches())
        counts.append(len(runs))
    assert counts == [3, 0, 0]  # the capture, the audits before its second and its seventeenth run
    runs.clear()
    trainer(tmp_path).predict(module, twenty_batches())
    assert not runs  # another Trainer's
    runs.clear()
    module.layers[4].register_forward_hook(lambda module, args, output: output + 1)
    run.predict(module, twenty_batches())
    assert len(runs) == 3
