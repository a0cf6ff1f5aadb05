"""A label or token out of range ends the run, at the next look of the host, with stock's error, the step and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torch_compat as pl
from torch_compat.callbacks.non_finite_guard import NonFiniteGuard

TOKENS, CLASSES, BATCH = 10, 9, 16


class Model(pl.LightningModule):
    def __init__(self, log: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(TOKENS, 8)
        self.head = torch.nn.Linear(8, CLASSES)
        self.logs = log

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self.head(self.tokens(tokens)), labels)
        if self.logs:
            self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def data(*, bad: int | None = None, rows: int = 64, devices: int = 1) -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, n, (rows,), generator=generator) for n in (TOKENS, CLASSES))
    if bad is not None:
        labels[bad] = CLASSES
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, labels), batch_size=BATCH // devices)


def trainer(**options: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options})


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Model, {}),
        (Manual, {}),
        (Model, {"devices": 2}),
        (Model, {"accumulate_grad_batches": 2}),
        (Model, {"callbacks": [NonFiniteGuard("stop")]}),
    ],
)
def test_the_step_the_op_and_the_line(model: type[Model], options: Any) -> None:
    with pytest.raises(IndexError, match=r"^Target 9 is out of bounds\.\n") as caught:
        trainer(**options).fit(model(), data(bad=2 * BATCH + 5, devices=options.get("devices", 1)))
    text = str(caught.value)
    step = 1 if "accumulate_grad_batches" in options else 2
    assert f"In training_step (global_step {step}, epoch 0, batch 2): nll_loss, {__file__}:" in text
    assert "F.cross_entropy(self.head(self.tokens(tokens)), labels)" in text


def test_no_checkpoint_has_what_came_after(tmp_path: Path) -> None:
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(IndexError):
        trainer(callbacks=[checkpoint], enable_checkpointing=True).fit(Model(), data(bad=2 * BATCH))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"]


def test_validation_too_and_long_runs_before_they_end() -> None:
    with pytest.raises(IndexError, match=r"In validation_step \(global_step 0, epoch 0, batch 1\)"):
        trainer().validate(Model(), data(bad=BATCH), verbose=False)
    seen: list[int] = []

    class Count(pl.callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    with pytest.raises(IndexError, match=r"batch 0\)"):
        trainer(callbacks=[Count()]).fit(Model(), data(bad=0, rows=60 * BATCH))
    assert len(seen) < 40


def test_reading_the_loss_is_a_look() -> None:
    class Reads(pl.callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            outputs["loss"].item()
            assert batch_idx < 1

    with pytest.raises(IndexError, match=r"batch 1\)"):
        trainer(callbacks=[Reads()]).fit(Model(), data(bad=BATCH))


def test_a_guard_that_skips_skips_it() -> None:
    guard, skipped, before = NonFiniteGuard("skip"), Model(), Model()
    with pytest.warns(UserWarning, match=r"Target 9 is out of bounds\.\nIn training_step \(global_step 3.*\n.*skipped"):
        trainer(callbacks=[guard]).fit(skipped, data(bad=3 * BATCH))
    assert guard.total_notfinite == 1
    trainer(limit_train_batches=3).fit(before, data())
    for name, value in before.state_dict().items():
        torch.testing.assert_close(skipped.state_dict()[name], value, rtol=0, atol=0)


def test_the_switch_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_INDEX_CHECKS", "0")
    run = trainer()
    run.fit(Model(), data(bad=BATCH))
    assert run.global_step == 4
