"""RichProgressBar: what it shows, when it draws, and that it leaves the console as it was."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import TextColumn

from tests.torch_compat.callbacks.scripted_bars import CountingTrainer, draws_anew
from torch_compat.callbacks import RichProgressBar
from torch_compat.callbacks.progress import rich_progress
from torch_compat.callbacks.progress.rich_progress import RichProgressBarTheme


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The drawing on a terminal of 200 columns; rich's console is global."""
    from rich import get_console

    draws_anew(monkeypatch)
    before = dict(get_console().__dict__)
    yield io.StringIO()
    get_console().__dict__.update(before)


def _options(screen: io.StringIO) -> dict[str, Any]:
    return {"file": screen, "force_terminal": True, "width": 200, "color_system": None}


class _EveryBatch(RichProgressBar):
    """Draws without regard to the clock, so that what is drawn does not depend on the machine."""

    def _due(self) -> bool:
        return True


class _OneDrawing(RichProgressBar):
    """Draws only what is always drawn."""

    def _due(self) -> bool:
        return False


def test_shows_stages_batches_times_speed_and_metrics(screen: io.StringIO) -> None:
    CountingTrainer().fit(_EveryBatch(console_kwargs=_options(screen)))
    text = screen.getvalue()
    assert "Sanity Checking" in text and "Validation" in text
    last = [line for line in text.splitlines() if "Epoch 1/1" in line][-1]
    assert "4/4" in last and "0:00:00 • " in last and "it/s" in last and "loss: 0.500" in last
    for done in range(1, 5):
        assert f"{done}/4" in text


def test_says_compiling_during_the_first_step_only(screen: io.StringIO) -> None:
    shown: dict[tuple[str, int, int], str] = {}

    def check(*when: Any) -> None:
        shown[when] = screen.getvalue()
        screen.truncate(0)
        screen.seek(0)

    CountingTrainer().fit(_OneDrawing(console_kwargs=_options(screen)), check=check)
    assert "compiling…" in shown["during", 0, 0]
    assert "compiling" not in shown["after", 0, 0] and "loss: 0.500" in shown["after", 0, 0]
    assert not any("compiling" in text for when, text in shown.items() if when != ("during", 0, 0))


def test_says_compiling_when_another_program_is_compiled(screen: io.StringIO) -> None:
    trainer, shown = CountingTrainer(epochs=1), {}
    trainer.compiles = {("sanity_check", 0), ("train", 0), ("train", 2), ("validate", 1)}

    def check(when: str, epoch: int, batch_idx: int) -> None:
        shown[when, batch_idx] = screen.getvalue()
        screen.truncate(0)
        screen.seek(0)

    trainer.fit(_OneDrawing(console_kwargs=_options(screen)), check=check)
    says = {when for when, text in shown.items() if "compiling…" in text}
    assert says == {("during sanity_check", 0), ("during", 0), ("during", 2), ("during validate", 1)}


def test_metrics_are_read_only_when_the_bar_is_drawn(screen: io.StringIO) -> None:
    trainer = CountingTrainer(batches=1000, epochs=1)
    trainer.fit(_OneDrawing(console_kwargs=_options(screen)))
    assert trainer.reads == 5, "after the sanity check, the first step, the last one, validation and the epoch"


def test_drawing_is_bounded_in_time(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(rich_progress.time, "monotonic", lambda: now[0])
    bar, slow = RichProgressBar(), RichProgressBar(refresh_rate=2)
    drawn = {bar: 0, slow: 0}
    for tick in range(1000):
        now[0] = 1 + tick / 1000
        for each in drawn:
            drawn[each] += each._due()
    assert drawn == {bar: 10, slow: 2}


@pytest.mark.parametrize("off", ["refresh_rate", "disable", "other process"])
def test_hidden_bars_write_and_read_nothing(off: str, screen: io.StringIO) -> None:
    bar = RichProgressBar(refresh_rate=0 if off == "refresh_rate" else 100, console_kwargs=_options(screen))
    if off == "disable":
        bar.disable()
    trainer = CountingTrainer(is_global_zero=off != "other process")
    trainer.fit(bar)
    trainer.evaluate(bar, "test")
    assert bar.is_disabled and trainer.reads == 0 and bar.progress is None and screen.getvalue() == ""


def test_unknown_length(screen: io.StringIO) -> None:
    trainer = CountingTrainer(batches=math.inf, epochs=1)
    trainer.fit(_EveryBatch(console_kwargs=_options(screen)), steps=3)
    assert "3/--" in screen.getvalue() and "-:--:--" in screen.getvalue()


def test_evaluation_bars(screen: io.StringIO) -> None:
    for stage, word in (("test", "Testing"), ("predict", "Predicting")):
        CountingTrainer().evaluate(RichProgressBar(console_kwargs=_options(screen)), stage)
        assert word in screen.getvalue() and "2/2" in screen.getvalue()


def test_theme_columns_and_metrics_can_be_changed(screen: io.StringIO) -> None:
    class Mine(_EveryBatch):
        def configure_columns(self, trainer: Any) -> list[Any]:
            return [TextColumn("my own column")]

        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            return {**super().get_metrics(trainer, pl_module), "b": torch.float32, "[red]": "text"}

    theme = RichProgressBarTheme(description="green", metrics_text_delimiter=" / ", metrics_format=".1e")
    trainer = CountingTrainer(epochs=1)
    trainer.metrics["loss"] = torch.tensor(0.5)
    trainer.fit(Mine(theme=theme, console_kwargs=_options(screen)))
    assert "my own column" in screen.getvalue()
    assert "loss: 5.0e-01 / b: torch.float32 / [red]: text" in screen.getvalue()


@pytest.mark.parametrize("leave", [False, True])
def test_leave(leave: bool, screen: io.StringIO) -> None:
    stops = []

    class Counted(RichProgressBar):
        def _stop_progress(self) -> None:
            stops.append(self.progress is not None)
            super()._stop_progress()

    CountingTrainer(epochs=3).fit(Counted(leave=leave, console_kwargs=_options(screen)))
    assert stops == ([True] * 3 if leave else [True])


def test_exception_gives_the_terminal_back(screen: io.StringIO) -> None:
    bar = RichProgressBar(console_kwargs=_options(screen))

    def fail(when: str, *_: Any) -> None:
        if when == "during":
            raise KeyboardInterrupt

    trainer = CountingTrainer()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(bar, check=fail)
    bar.on_exception(trainer, None, KeyboardInterrupt())
    assert bar.progress is not None and not bar.progress.live.is_started
    assert screen.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"
    CountingTrainer().fit(bar)  # and the bar can be used again


def test_bars_that_are_over_are_hidden(screen: io.StringIO) -> None:
    bar, most = RichProgressBar(console_kwargs=_options(screen)), [0]

    def check(*when: Any) -> None:
        assert bar.progress is not None
        most[0] = max(most[0], sum(task.visible for task in bar.progress.tasks))

    CountingTrainer(epochs=20, batches=2).fit(bar, check=check)
    assert most[0] == 2, "training and validation"


def test_bar_can_be_pickled_and_names_what_is_missing(screen: io.StringIO) -> None:
    bar = RichProgressBar()
    bar._console = Console()
    with pytest.raises(TypeError, match=r"RichProgressBar\.train_progress_bar"):
        _ = pickle.loads(pickle.dumps(bar)).train_progress_bar
