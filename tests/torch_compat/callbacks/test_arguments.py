"""Refusals and messages of callbacks; names, durations and schedules that they compute."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
import torch
import yaml

from torch_compat import Trainer
from torch_compat.callbacks import (
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    ProgressBar,
    Timer,
)
from torch_compat.callbacks.checkpoint_name import format_name
from torch_compat.callbacks.optimizer_names import name_optimizers
from torch_compat.demos.boring_classes import BoringModel
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ModelCheckpoint(save_top_k=-2), MisconfigurationException, r"save_top_k=-2. Must be >= -1"),
        (lambda: ModelCheckpoint(save_top_k=3), MisconfigurationException, r"save_top_k=3, monitor=None\).*Pass `monitor`"),
        (lambda: ModelCheckpoint(mode="best"), MisconfigurationException, "`mode` can be min, max but got best"),
        (lambda: ModelCheckpoint(every_n_epochs=-1), MisconfigurationException, r"every_n_epochs=-1. Must be >= 0"),
        (lambda: ModelCheckpoint(every_n_train_steps=-1), MisconfigurationException, "every_n_train_steps=-1"),
        (
            lambda: ModelCheckpoint(every_n_train_steps=1, train_time_interval=timedelta(1)),
            MisconfigurationException,
            "every_n_train_steps=1, .*train_time_interval=1 day.*mutually exclusive",
        ),
        (lambda: ModelCheckpoint().to_yaml(), ValueError, "needs `filepath`"),
        (lambda: EarlyStopping("x", mode="auto"), MisconfigurationException, "`mode` can be min, max, got auto"),
        (lambda: LearningRateMonitor("batch"), MisconfigurationException, "`step` or `epoch` or `None`, got 'batch'"),
        (lambda: Timer("1:00:00"), MisconfigurationException, r"'1:00:00'\)` is not a valid duration: expected 'DD:HH:MM:SS'"),
        (lambda: Timer(interval="batch"), MisconfigurationException, r"interval=batch\)`. Possible choices are: step, epoch"),
        (lambda: Timer().start_time("fit"), ValueError, "'fit' is not a stage: expected one of train, "),
        (lambda: GradientAccumulationScheduler({}), TypeError, r"expected \{epoch: batches"),
        (lambda: GradientAccumulationScheduler({-1: 2}), MisconfigurationException, r"Epoch should be an int .* Got \[-1\]"),
        (lambda: GradientAccumulationScheduler({0: 0}), MisconfigurationException, r"factor should be an int .* Got \[0\]"),
        (lambda: OnExceptionCheckpoint(".", ""), ValueError, "filename cannot be empty"),
        (lambda: BasePredictionWriter("step"), MisconfigurationException, "should be one of .*batch_and_epoch"),
        (lambda: BasePredictionWriter().write_on_epoch_end(*[None] * 4), NotImplementedError, "must override write_on_epoch_end"),
        (lambda: ProgressBar().enable(), NotImplementedError, r"must implement `enable\(\)`"),
        (lambda: LambdaCallback(on_epoch_start=print), TypeError, "on_epoch_start"),
    ],
)
def test_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("template", "metrics", "named", "plain"),
    [
        ("{epoch}", {"epoch": 0}, "epoch=0", "0"),
        ("{epoch:03d}", {"epoch": torch.tensor(5)}, "epoch=005", "005"),
        ("{epoch}-{val_loss:.2f}", {"epoch": 2, "val_loss": torch.tensor(0.123456)}, "epoch=2-val_loss=0.12", "2-0.12"),
        ("{epoch}{epoch_x}{epoch}", {"epoch": 1, "epoch_x": 2}, "epoch=1epoch_x=2epoch=1", "121"),
        ("m/{val/loss:.1f}", {"val/loss": 0.55}, "m/val/loss=0.6", "m/0.6"),
        ("{a.b}", {"a.b": 1}, "a.b=1", "1"),
        ("{missing:d}-{missing:.2f}", {}, "missing=0-missing=0.00", "0-0.00"),
        ("no fields", {"epoch": 1}, "no fields", "no fields"),
    ],
)
def test_checkpoint_names(template: str, metrics: dict[str, Any], named: str, plain: str) -> None:
    assert format_name(template, metrics, insert_names=True) == named
    assert format_name(template, metrics, insert_names=False) == plain


def test_checkpoint_name_that_cannot_be_written_names_the_metric() -> None:
    with pytest.raises(ValueError, match=r"'\{loss:d\}': loss=0\.5 cannot be written with format 'd'"):
        format_name("{loss:d}", {"loss": 0.5}, insert_names=True)


def test_checkpoint_names_follow_the_class_attributes(tmp_path: Any) -> None:
    class Mine(ModelCheckpoint):
        CHECKPOINT_EQUALS_CHAR = ":"
        CHECKPOINT_JOIN_CHAR = "_"
        FILE_EXTENSION = ".model"

    callback = Mine(tmp_path)
    assert callback.format_checkpoint_name({"epoch": 1, "step": 2}) == f"{tmp_path}/epoch:1_step:2.model"
    assert callback.format_checkpoint_name({}, "{a}", ver=3, prefix="p") == f"{tmp_path}/p_a:0_v3.model"


def test_best_models_as_yaml(tmp_path: Any) -> None:
    callback = ModelCheckpoint(tmp_path, monitor="loss")
    callback.best_k_models = {"a.ckpt": torch.tensor(0.5)}
    callback.to_yaml()
    assert yaml.safe_load((tmp_path / "best_k_models.yaml").read_text()) == {"a.ckpt": 0.5}


def test_checkpoint_state_of_another_directory_is_not_taken_over(tmp_path: Any) -> None:
    saved = ModelCheckpoint(tmp_path / "a", monitor="loss")
    saved.best_model_path, saved.best_model_score = "best", torch.tensor(1.0)
    saved.best_k_models = {"best": torch.tensor(1.0)}
    same, other = ModelCheckpoint(tmp_path / "a", monitor="loss"), ModelCheckpoint(tmp_path / "b", monitor="loss")
    same.load_state_dict(saved.state_dict())
    assert same.state_dict() == saved.state_dict()
    with pytest.warns(UserWarning, match=r"dirpath has changed .* only `best_model_path` is remembered"):
        other.load_state_dict(saved.state_dict())
    assert (other.best_model_path, other.best_k_models) == ("best", {})


def test_early_stopping_state_round_trip_and_old_states() -> None:
    saved = EarlyStopping("loss")
    saved.wait_count, saved.best_score, saved.stopped_epoch = 2, torch.tensor(0.5), 4
    fresh = EarlyStopping("loss")
    fresh.load_state_dict(saved.state_dict())
    assert fresh.state_dict() == saved.state_dict()
    old = {key: value for key, value in saved.state_dict().items() if not key.startswith("stopping_reason")}
    fresh.load_state_dict(old)
    assert fresh.stopping_reason.name == "NOT_STOPPED"


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("00:00:01:10", 70), ("10:01:00:00", 867600), (timedelta(hours=1), 3600), ({"minutes": 2}, 120), (None, None)],
)
def test_timer_durations(duration: Any, seconds: float | None) -> None:
    assert Timer(duration)._duration == seconds
    assert Timer(duration).time_remaining() == seconds


def test_timer_counts_what_was_spent_before_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("torch_compat.callbacks.timer.time.monotonic", lambda: now[0])
    first = Timer("00:00:00:10")
    assert first.time_elapsed() == 0 and first.start_time() is None
    first.on_train_start(None, None)
    now[0] = 104.0
    second = Timer("00:00:00:10")
    second.load_state_dict(first.state_dict())
    assert second.time_remaining() == 6
    second.on_train_start(None, None)
    now[0] = 109.0
    second.on_train_end(None, None)
    now[0] = 200.0
    assert (second.time_elapsed(), second.end_time()) == (9, 109.0)
    assert set(second.state_dict()["time_elapsed"]) == {"train", "sanity_check", "validate", "test", "predict"}


def test_accumulation_schedule() -> None:
    given = {4: 2, 8: 3}
    schedule = GradientAccumulationScheduler(given)
    assert [schedule.get_accumulate_grad_batches(epoch) for epoch in (0, 3, 4, 7, 8, 99)] == [1, 1, 2, 2, 3, 3]
    assert given == {4: 2, 8: 3}, "the user's dict is left alone"
    assert schedule.going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({2: 1}).going_to_accumulate_grad_batches()


@pytest.mark.parametrize(("batch", "found"), [(0, "set to 2 before batch 1 of"), (1, None), (2, "before batch 3"), (3, None)])
def test_a_window_that_begins_in_its_middle_is_refused_where_gradients_are_gone(batch: int, found: str | None) -> None:
    def turn(trainer: Trainer, module: Any, outputs: Any, seen: Any, batch_idx: int) -> None:
        trainer.accumulate_grad_batches = 2 if batch_idx == batch else trainer.accumulate_grad_batches

    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    callback = LambdaCallback(on_train_batch_end=turn)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=5, callbacks=[callback], **options)
    with pytest.raises(MisconfigurationException, match=found) if found else contextlib.nullcontext():
        trainer.fit(BoringModel())


def test_groups_of_one_optimizer_need_different_names() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weight], "name": "same"} for weight in weights], lr=0.1)
    with pytest.raises(MisconfigurationException, match=r"lr-SGD has duplicated parameter group names \{'same'\}"):
        name_optimizers([], [optimizer])


def test_second_parameter_group_takes_the_history_along() -> None:
    monitor = LearningRateMonitor()
    monitor.lrs = {"lr-SGD": [0.1, 0.2]}
    monitor._follow_new_groups(["lr-SGD/pg1", "lr-SGD/pg2"])
    assert monitor.lrs == {"lr-SGD/pg1": [0.1, 0.2], "lr-SGD/pg2": []}


def test_lambda_callback_has_exactly_the_hooks_it_was_given() -> None:
    calls: list[Any] = []
    callback = LambdaCallback(setup=lambda *args: calls.append(args), on_fit_end=lambda *args: calls.append(args))
    callback.setup("trainer", "module", "fit")
    callback.on_train_start("trainer", "module")
    assert calls == [("trainer", "module", "fit")]
    assert set(vars(callback)) == {"setup", "on_fit_end"}


def test_state_keys() -> None:
    class Mine(Callback):
        @property
        def state_key(self) -> str:
            return self._generate_state_key(a=1, b="x")

    name = f"{test_state_keys.__name__}.<locals>.Mine"
    assert Mine().state_key == name + "{'a': 1, 'b': 'x'}"
    assert Timer().state_key == "Timer" and Mine()._legacy_state_key is Mine
