"""ModelCheckpoint saves while training goes on, and never leaves a moment without a checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import torch_compat as pl
from tests.torch_compat.callbacks import fit_script
from torch_compat.callbacks import Callback, ModelCheckpoint
from torch_compat.checkpoint import checkpoint_dict
from torch_compat.plugins import ShardedCheckpointIO
from torch_compat.strategies import DDPStrategy
from xlatrain.checkpoint import CheckpointError, file_saving, is_checkpoint, saving

KINDS = {"file": (file_saving, "_write", list), "directory": (saving, "write_record", lambda: [ShardedCheckpointIO()])}
"""Of a checkpoint → where it is committed: module and name; plugins that make it."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, list[Any]]:
    monkeypatch.setattr(checkpoint_dict, "_AT_ONCE", 0)
    module, name, plugins = KINDS[request.param]
    return module, name, plugins()


def _committed(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if is_checkpoint(path)}


def test_training_goes_on_and_the_old_one_stays_until_the_new_one_is_committed(
    tmp_path: Path, kind: tuple[Any, str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, plugins = kind
    may_commit, real, at_commit, at_step = threading.Event(), getattr(module, name), [], []

    def hold(path: Any, *args: Any) -> None:
        assert may_commit.wait(300)
        at_commit.append((Path(path).name, _committed(tmp_path)))
        real(path, *args)

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                at_step.append(_committed(tmp_path))
                may_commit.set()

    monkeypatch.setattr(module, name, hold)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    run = fit_script.trainer(pl, str(tmp_path), [Watch(), checkpoint], max_epochs=1, plugins=plugins)
    run.fit(fit_script.make_module(pl), fit_script.loader(3))

    assert at_step == [set()], "the second step starts before the first step's checkpoint is committed"
    first, second, third = (f"epoch=0-step={step}.ckpt" for step in (1, 2, 3))
    assert at_commit == [(first, set()), (second, {first}), (third, {second})]
    assert _committed(tmp_path) == {third}, "fit returns after the last commit, and what it replaced is gone"
    assert checkpoint.best_model_path == str(tmp_path / third)


def test_save_that_fails_ends_training_with_the_reason_and_keeps_the_one_before(
    tmp_path: Path, kind: tuple[Any, str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, plugins = kind
    real, saves = getattr(module, name), []

    def fail_second(path: Any, *args: Any) -> None:
        saves.append(path)
        if len(saves) > 1:
            raise OSError("the disk is full")
        real(path, *args)

    monkeypatch.setattr(module, name, fail_second)
    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=1)]
    run = fit_script.trainer(pl, str(tmp_path), callbacks, max_epochs=1, plugins=plugins)
    with pytest.raises(CheckpointError, match="the disk is full"):
        run.fit(fit_script.make_module(pl), fit_script.loader(4))
    assert _committed(tmp_path) == {"epoch=0-step=1.ckpt"}


def test_strategy_that_saves_in_its_own_way_is_used(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []

    class Mine(DDPStrategy):
        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            Path(filepath).mkdir()
            calls.append(("save", Path(filepath).name))

        def remove_checkpoint(self, filepath: Any) -> None:
            calls.append(("remove", Path(filepath).name))

    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=1)]
    run = pl.Trainer(
        accelerator="cpu", devices=1, strategy=Mine(), max_epochs=1, logger=False, callbacks=callbacks,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    run.fit(fit_script.make_module(pl), fit_script.loader(2))
    assert calls == [("save", "epoch=0-step=1.ckpt"), ("save", "epoch=0-step=2.ckpt"), ("remove", "epoch=0-step=1.ckpt")]
