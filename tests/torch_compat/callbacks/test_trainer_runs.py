"""Callbacks in real runs: what they leave behind is what Lightning leaves; what a terminal shows."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_compat as pl
from tests.scripted import results_of
from tests.torch_compat.callbacks import fit_script
from tests.torch_compat.callbacks.scripted_bars import draws_anew
from torch_compat.callbacks import Callback, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from torch_compat.callbacks.progress.tqdm_progress import Tqdm
from torch_compat.loggers import CSVLogger, TensorBoardLogger
from torch_compat.utilities.exceptions import MisconfigurationException

_SCRIPT = Path(fit_script.__file__)
_RUNS = [run.__name__ for run in fit_script.RUNS]


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, Any], dict[str, Any]]:
    return results_of(_SCRIPT, "torch_compat", timeout_s=500), results_of(_SCRIPT, "lightning.pytorch", timeout_s=500)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("name", _RUNS)
def test_same_as_lightning(runs: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    assert runs[0][name] == runs[1][name]


def _fit(root: Path, *callbacks: Any, **options: Any) -> pl.Trainer:
    run = fit_script.trainer(pl, str(root), list(callbacks), enable_progress_bar=True, **options)
    run.fit(fit_script.make_module(pl), fit_script.loader(), fit_script.loader(2))
    return run


def test_terminal_shows_stages_compilation_version_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fit(tmp_path, TQDMProgressBar(), logger=CSVLogger(tmp_path, version=7), max_epochs=2)
    drawn = [line.strip() for line in re.split(r"[\r\n]|\x1b\[A", capsys.readouterr().out) if line.strip()]
    compiled = [re.sub(r" +\d+%.*", "", line) for line in drawn if "compiling…" in line]
    assert compiled == ["Sanity Checking DataLoader 0:", "Epoch 0:"], "two programs: validation and training"
    last = next(line for line in reversed(drawn) if line.startswith("Epoch 1: 100%"))
    assert re.search(r"4/4 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+it/s, v_num=7, train_loss_step=[\d.]+, val_loss=", last), last
    assert "train_loss_epoch=" in last


def test_rich_bar_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    draws_anew(monkeypatch)
    _fit(tmp_path, RichProgressBar(console_kwargs={"force_terminal": True, "width": 160}))
    shown = capsys.readouterr().out
    assert "compiling…" in shown and "Sanity Checking" in shown and "Epoch 2/2" in shown and "val_loss: " in shown


def test_bar_does_not_read_the_device_at_every_step(tmp_path: Path) -> None:
    reads: list[int] = []

    class Counted(TQDMProgressBar):
        def init_train_tqdm(self) -> Tqdm:
            bar = super().init_train_tqdm()
            bar.mininterval = math.inf
            return bar

        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            reads.append(trainer.global_step)
            return super().get_metrics(trainer, pl_module)

    run = fit_script.trainer(pl, str(tmp_path), [Counted()], enable_progress_bar=True, max_epochs=1)
    run.fit(fit_script.make_module(pl), fit_script.loader(50))
    assert reads == [1, 50, 50], "after the first step, the last, and the epoch"


def test_only_overridden_hooks_are_called(tmp_path: Path) -> None:
    class Quiet(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_train_batch") or "backward" in name or "optimizer_step" in name or "zero_grad" in name:
                raise AssertionError(f"{name} was asked for at run time")
            return super().__getattribute__(name)

    _fit(tmp_path, Quiet(), max_epochs=1)


def test_monitor_never_logged_is_named_and_nothing_of_the_training_is_lost(tmp_path: Path) -> None:
    module = fit_script.make_module(pl)
    before = module.layer.weight.detach().clone()
    run = fit_script.trainer(pl, str(tmp_path), [ModelCheckpoint(tmp_path, monitor="accuracy")])
    with pytest.raises(MisconfigurationException, match=r"monitor='accuracy'.*Call `self\.log\('accuracy'") as error:
        run.fit(module, fit_script.loader(), fit_script.loader(2))
    assert all(repr(name) in str(error.value) for name in ("train_loss", "train_loss_epoch", "val_loss"))
    assert run.interrupted and run.global_step == 4
    assert not torch.equal(module.layer.weight, before) and type(module.layer.weight) is torch.nn.Parameter
    run.save_checkpoint(tmp_path / "by hand.ckpt")
    assert torch.equal(type(module).load_from_checkpoint(tmp_path / "by hand.ckpt").layer.weight, module.layer.weight)


def test_monitor_that_steps_wait_for_in_vain_is_named(tmp_path: Path) -> None:
    """Lightning says nothing here, and saves nothing."""
    callback = ModelCheckpoint(tmp_path, monitor="accuracy", every_n_train_steps=1, save_top_k=1)
    run = fit_script.trainer(pl, str(tmp_path), [callback], max_epochs=2)
    with pytest.warns(UserWarning, match="monitor='accuracy'.*No checkpoint is saved until it is logged"):
        run.fit(fit_script.make_module(pl), fit_script.loader(), fit_script.loader(2))


def test_graph_goes_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module = fit_script.make_module(pl)
    module.example_input_array = torch.zeros(2, 4)
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    run = fit_script.trainer(pl, str(tmp_path), [], logger=logger, max_epochs=1)
    run.fit(module, fit_script.loader())
    events = EventAccumulator(logger.log_dir).Reload()
    assert any("layer" in node.name for node in events.Graph().node)
    assert {"train_loss_step", "train_loss_epoch", "epoch", "hp_metric"} <= set(events.Tags()["scalars"])
