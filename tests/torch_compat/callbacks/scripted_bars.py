"""A trainer that only counts, to drive progress bars through a run; `test_trainer_runs.py` has real runs."""

from __future__ import annotations

from typing import Any

import pytest

from torch_compat.callbacks import ProgressBar
from torch_compat.run.states import RunningStage, TrainerFn, TrainerState


def draws_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rich take its terminal for one that can move the cursor, whatever the variables of this machine say of theirs."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


class CountingTrainer:
    """Calls a bar's hooks as a run of `epochs` × `batches` does, and counts how often metrics are read."""

    def __init__(self, *, batches: float = 4, val_batches: float = 2, epochs: int = 2, is_global_zero: bool = True) -> None:
        self.state = TrainerState(fn=TrainerFn.FITTING, stage=RunningStage.TRAINING)
        self.is_global_zero = is_global_zero
        self.loggers: list[Any] = []
        self.max_epochs, self.max_steps, self.current_epoch, self.global_step = epochs, -1, 0, 0
        self.num_training_batches = batches
        self.num_val_batches = self.num_sanity_val_batches = [val_batches]
        self.num_test_batches = self.num_predict_batches = [val_batches, val_batches]
        self.enable_validation, self.check_val_every_n_epoch = True, 1
        self.sanity_checking = False
        self.compiles = {("train", 0)}  # (stage, batch_idx) of the steps that are compiled, once
        self.metrics: dict[str, Any] = {"loss": 0.5}
        self.reads = 0

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        self.reads += 1
        return dict(self.metrics)

    def fit(self, bar: ProgressBar, steps: int | None = None, check: Any = lambda *_: None) -> None:
        """Runs `fit`; `check(when, epoch, batch_idx)` is called while each step would run, and after it."""
        bar.setup(self, None, "fit")
        bar.on_sanity_check_start(self, None)
        self.sanity_checking = True
        self._validate(bar, "sanity_check", check)
        self.sanity_checking = False
        bar.on_sanity_check_end(self, None)
        bar.on_train_start(self, None)
        for epoch in range(self.max_epochs):
            self.current_epoch = epoch
            bar.on_train_epoch_start(self, None)
            for batch_idx in range(steps or int(self.num_training_batches)):
                bar.on_train_batch_start(self, None, None, batch_idx)
                self._step(bar, "train", batch_idx)
                check("during", epoch, batch_idx)
                self.global_step += 1
                bar.on_train_batch_end(self, None, None, None, batch_idx)
                check("after", epoch, batch_idx)
            self._validate(bar, "validate", check)
            bar.on_train_epoch_end(self, None)
        bar.on_train_end(self, None)
        bar.teardown(self, None, "fit")

    def _validate(self, bar: ProgressBar, stage: str, check: Any) -> None:
        self.state.stage = RunningStage(stage)
        bar.on_validation_start(self, None)
        for batch_idx in range(int(self.num_val_batches[0])):
            bar.on_validation_batch_start(self, None, None, batch_idx)
            self._step(bar, stage, batch_idx)
            check(f"during {stage}", self.current_epoch, batch_idx)
            bar.on_validation_batch_end(self, None, None, None, batch_idx)
            check(f"after {stage}", self.current_epoch, batch_idx)
        bar.on_validation_epoch_end(self, None)
        bar.on_validation_end(self, None)
        self.state.stage = RunningStage.TRAINING

    def _step(self, bar: ProgressBar, stage: str, batch_idx: int) -> None:
        if (stage, batch_idx) in self.compiles:
            self.compiles.remove((stage, batch_idx))
            for compiling in (True, False, True, False):  # captured, then compiled
                bar.show_compiling(compiling)

    def evaluate(self, bar: ProgressBar, stage: str) -> None:
        """Runs `test` or `predict` over two dataloaders."""
        self.state.fn, self.state.stage = TrainerFn(stage), RunningStage(stage)
        bar.setup(self, None, stage)
        getattr(bar, f"on_{stage}_start")(self, None)
        for loader in range(2):
            for batch_idx in range(int(self.num_test_batches[loader])):
                getattr(bar, f"on_{stage}_batch_start")(self, None, None, batch_idx, loader)
                getattr(bar, f"on_{stage}_batch_end")(self, None, None, None, batch_idx, loader)
        getattr(bar, f"on_{stage}_end")(self, None)
        bar.teardown(self, None, stage)
