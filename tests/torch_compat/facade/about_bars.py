"""Progress bars: every move of a bar in a run, what is left of it afterwards, and when metrics are asked for."""

from __future__ import annotations

import contextlib
import io
from typing import Any
from unittest.mock import patch

import torch
from answering import ask, ask_each, attempt
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress import tqdm_progress
from lightning.pytorch.demos.boring_classes import RandomIterableDataset
from lightning.pytorch.loggers import CSVLogger
from models import data, seeded, trainer
from rich.progress import Progress
from torch.utils.data import DataLoader


def drive(bar: Any, run: str, *loaders: Any, **options: Any) -> Any:
    """A run with the bar, whose drawing goes nowhere."""
    one = trainer(enable_progress_bar=True, callbacks=[bar], **options)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        getattr(one, run)(seeded(), *loaders)
    return one


class Moves(tqdm_progress.Tqdm):
    """Keeps every value that the bar's counters get."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.counts: list[Any] = []
        self.totals: list[Any] = []
        self.texts: list[Any] = []
        super().__init__(*args, **kwargs)

    @property
    def n(self) -> Any:
        return self.counts[-1] if self.counts else 0

    @n.setter
    def n(self, value: Any) -> None:
        self.counts.append(value)

    @property
    def total(self) -> Any:
        return self.totals[-1] if self.totals else None

    @total.setter
    def total(self, value: Any) -> None:
        self.totals.append(value)

    def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
        self.texts.append(desc)
        super().set_description(desc, refresh)


def moves(run: str, *loaders: Any, refresh_rate: int = 1, **options: Any) -> Any:
    with patch.object(tqdm_progress, "Tqdm", Moves):
        bar = TQDMProgressBar(refresh_rate=refresh_rate)
        drive(bar, run, *loaders, **options)
    bars = [getattr(bar, f"_{stage}_progress_bar") for stage in ("train", "val", "test", "predict")]
    return [None if each is None else [each.counts, each.totals, each.texts, each.disable, each.leave] for each in bars]


ask_each(
    tqdm_fit=lambda: moves("fit", data(), data(4), max_epochs=2),
    tqdm_fit_every_3=lambda: moves("fit", data(14), data(10), refresh_rate=3, max_epochs=1, val_check_interval=0.5),
    tqdm_fit_never=lambda: moves("fit", data(14), data(10), refresh_rate=0, max_epochs=1),
    tqdm_test_every_2=lambda: moves("test", [data(4), data(14)], refresh_rate=2),
    tqdm_predict_every_3=lambda: moves("predict", [data(4), data(14)], refresh_rate=3),
)


def tasks(run: str, *loaders: Any, leave: bool = False, **options: Any) -> Any:
    """The calls that move rich's bars, and its tasks afterwards."""
    calls: list[Any] = []
    kept = Progress.update, Progress.reset

    def noted(self: Progress, task_id: Any, _of: int = 0, **fields: Any) -> None:
        calls.append([_of, task_id, fields])
        kept[_of](self, task_id, **fields)

    bar = RichProgressBar(leave=leave)
    with patch.object(Progress, "update", noted), patch.object(Progress, "reset", lambda *a, **k: noted(*a, _of=1, **k)):
        drive(bar, run, *loaders, **options)
    assert bar.progress is not None
    ids = [getattr(bar, f"{name}_progress_bar_id") for name in ("train", "val_sanity", "val", "test", "predict")]
    return [
        calls,
        ids,
        [[task.id, task.description, task.completed, task.visible, task.finished] for task in bar.progress.tasks],
    ]


ask_each(
    rich_fit=lambda: tasks("fit", data(), data(4), max_epochs=2),
    rich_leaves=lambda: tasks("fit", data(), data(4), max_epochs=3, leave=True),
    rich_validate=lambda: tasks("validate", [data(4), data(6)]),
    rich_test=lambda: tasks("test", [data(4), data(6)]),
    rich_predict=lambda: tasks("predict", [data(4), data(6)]),
    rich_without_length=lambda: tasks("fit", DataLoader(RandomIterableDataset(4, 6), batch_size=2), max_epochs=1)[1:],
)


class Asked(ProgressBar):
    """Notes what metrics a bar gets."""

    def get_metrics(self, *args: Any) -> Any:
        found = super().get_metrics(*args)
        self.__dict__.setdefault("found", []).append(dict(found))
        return found


class AskedTqdm(Asked, TQDMProgressBar): ...


class AskedRich(Asked, RichProgressBar): ...


@ask
def bars_metrics() -> Any:
    """One batch per epoch, so that the bar is drawn for each."""
    found = []
    for bar in (AskedTqdm(), AskedRich()):
        one = drive(bar, "fit", data(2), data(2), max_epochs=2, logger=CSVLogger(".", name=type(bar).__name__))
        found.append([bar.found, attempt(lambda one=one: one.progress_bar_metrics), torch.tensor(one.global_step)])
    return found
