"""A fit whose state is kept in its hosts' memory goes on from there, as one that was not disturbed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_compat as pl
from torch_compat.plugins.io import TorchCheckpointIO
from torch_compat.trainer import restarts
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.cluster.keepers import VARIABLE, Keepers
from xlatrain.cluster.launch import RESUME_SINCE, SECRET

STEPS = 8


class Model(pl.LightningModule):
    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
        self.fails_at = fails_at
        self.begins_at = -1
        self.rows: list[int] = []

    def on_train_start(self) -> None:
        self.begins_at = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[1]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows += batch[0].tolist()
        if self.trainer.global_step == self.fails_at:
            raise InterruptedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.05)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with Keepers(2, 4, "known") as keepers:
        keepers.begin_world([0, 1])
        for name, value in ((VARIABLE, keepers.variables(0)[VARIABLE]), (SECRET, "known"), (RESUME_SINCE, "1")):
            monkeypatch.setenv(name, value)
        yield monkeypatch


def fit(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Model, ckpt_path: str | None = None, **options: Any) -> pl.Trainer:
    """A fit as of a process that has just been started."""
    monkeypatch.setattr(restarts, "_fits", 0)
    torch.manual_seed(2)
    model.net.apply(lambda one: one.reset_parameters() if isinstance(one, torch.nn.Linear) else None)
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="fsdp", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(torch.arange(24), rows), batch_size=3, shuffle=True), ckpt_path=ckpt_path)
    return trainer


def test_a_fit_that_fails_goes_on_from_memory(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, failing, resumed = Model(), Model(fails_at=7), Model()
    with launched.context() as alone:
        alone.delenv(VARIABLE)
        fit(launched, tmp_path / "whole", whole)
    with pytest.raises(InterruptedError):
        fit(launched, tmp_path, failing)
    for thread in threading.enumerate():
        if thread.name == "xlatrain-snapshot":  # a process that has failed would be gone, and it with it
            thread.join()
    assert list(tmp_path.rglob("*.ckpt")) == []
    trainer = fit(launched, tmp_path, resumed)
    assert 7 - 4 <= resumed.begins_at <= 6 and resumed.begins_at % 2 == 0  # at most 4 steps are lost
    assert failing.rows[: 6 * resumed.begins_at] + resumed.rows == whole.rows
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    facts = trainer.run_time.facts()["memory_snapshots"]
    assert facts["every_n_train_steps"] == 2 and facts["snapshots"] == (8 - resumed.begins_at) // 2
    assert 0 < facts["bytes"] == facts["kept_bytes"]


@pytest.mark.parametrize(
    ("executor", "plugins", "said"),
    [
        ("auto", [TorchCheckpointIO()], "checkpoints go through TorchCheckpointIO: leave --memory-steps out"),
        ("eager", [], "steps run eagerly: leave --memory-steps out"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    executor: str, plugins: list[Any], said: str, launched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched.setenv("XLATRAIN_EXECUTOR", executor)
    with pytest.raises(MisconfigurationException, match=said):
        fit(launched, tmp_path, Model(), plugins=plugins)


def test_a_path_that_the_script_gives_is_obeyed_and_nothing_is_kept(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = fit(launched, tmp_path, Model(), max_steps=4)
    first.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=r"--memory-steps: nothing is kept in memory, since fit\(ckpt_path=…\) is obeyed"):
        again = fit(launched, tmp_path, model := Model(), ckpt_path=str(tmp_path / "a.ckpt"))
    assert model.begins_at == first.global_step and "memory_snapshots" not in again.run_time.facts()
