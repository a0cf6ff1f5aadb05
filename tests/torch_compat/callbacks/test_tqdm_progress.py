"""TQDMProgressBar: what it shows, when it draws, and what it costs."""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import pytest
import torch
from tqdm import tqdm

from tests.torch_compat.callbacks.scripted_bars import CountingTrainer
from torch_compat.callbacks import Callback, TQDMProgressBar
from torch_compat.callbacks.progress.tqdm_progress import Tqdm, convert_inf


def _lines(text: str) -> list[str]:
    """The lines that were drawn, one entry per drawing."""
    return [line.strip() for line in re.split(r"[\r\n]|\x1b\[A", text) if line.strip()]


class _EveryBatch(TQDMProgressBar):
    """Draws without regard to the clock, so that what is drawn does not depend on the machine."""

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.mininterval = 0
        return bar


class _OneDrawing(TQDMProgressBar):
    """Draws only what is always drawn."""

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.mininterval = math.inf
        return bar


def test_shows_stages_batches_eta_rate_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    CountingTrainer().fit(_EveryBatch())
    lines = _lines(capsys.readouterr().out)
    assert any(line.startswith("Sanity Checking DataLoader 0: 100%") for line in lines)
    assert any(line.startswith("Validation DataLoader 0: 100%") and "2/2" in line for line in lines)
    last = [line for line in lines if line.startswith("Epoch 1: 100%")][-1]
    assert re.search(r"4/4 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+it/s, loss=0\.500\]", last), last
    for done in range(1, 5):
        assert any(line.startswith("Epoch 1") and f"{done}/4" in line and "it/s" in line for line in lines)


def test_says_compiling_during_the_first_step_only(capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[tuple[str, int, int], str] = {}

    def check(*when: Any) -> None:
        shown[when] = capsys.readouterr().out

    CountingTrainer().fit(_OneDrawing(), check=check)
    assert "compiling…" in shown["during", 0, 0]
    after = _lines(shown["after", 0, 0])[-1]
    assert "compiling" not in after and "loss=0.500" in after, "the first step's metrics replace the line at once"
    later = "".join(text for when, text in shown.items() if when not in {("during", 0, 0)})
    assert "compiling" not in later


def test_says_compiling_when_another_program_is_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, shown = CountingTrainer(epochs=1), {}
    trainer.compiles = {("sanity_check", 0), ("train", 0), ("train", 2), ("validate", 1)}

    def check(when: str, epoch: int, batch_idx: int) -> None:
        shown[when, batch_idx] = capsys.readouterr().out

    trainer.fit(_OneDrawing(), check=check)
    says = {when for when, text in shown.items() if "compiling…" in text}
    assert says == {("during sanity_check", 0), ("during", 0), ("during", 2), ("during validate", 1)}
    assert "loss=0.500" in shown["after", 2]


def test_rate_and_remaining_time_leave_out_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("torch_compat.callbacks.progress.tqdm_progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Tqdm, "_time", property(lambda self: lambda: now[0], lambda self, value: None), raising=False)
    bar = Tqdm(total=100, ncols=80, bar_format=TQDMProgressBar.BAR_FORMAT, file=open("/dev/null", "w"))  # noqa: SIM115 - closed with the bar
    now[0], bar.n = 60.0, 1  # a minute for the first step
    bar.restart_rate(1)
    now[0], bar.n = 61.0, 11
    assert bar.format_dict["rate"] == 10.0
    assert "11/100 [01:01<00:08, 10.00it/s]" in str(bar)
    bar.restart_rate(1)
    assert "<?, ?it/s]" in str(bar), "nothing is known yet"
    bar.restart(50)
    assert bar.format_dict["rate"] is None
    bar.close()
    bar.fp.close()


def test_metrics_are_read_only_when_the_bar_is_drawn() -> None:
    """Reading a metric waits for the device; a step must not."""
    trainer = CountingTrainer(batches=1000, epochs=1)
    trainer.fit(_OneDrawing())
    # After the sanity check, the first step (in place of "compiling…"), the last step, validation, and the end of the epoch.
    assert trainer.reads == 5
    trainer = CountingTrainer(batches=100, epochs=1)
    bar = _EveryBatch(refresh_rate=30)
    trainer.fit(bar)
    assert trainer.reads == 5 + 3, "batches 30, 60 and 90 as well"


def test_count_is_right_between_drawings() -> None:
    bar, counts = _OneDrawing(), []

    def check(when: str, *_: Any) -> None:
        if when in ("during", "after"):
            counts.append(bar.train_progress_bar.n)

    CountingTrainer(epochs=1).fit(bar, check=check)
    assert counts == [0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("off", ["refresh_rate", "disable", "other process"])
def test_hidden_bars_write_and_read_nothing(off: str, capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar(refresh_rate=0 if off == "refresh_rate" else 1)
    if off == "disable":
        bar.disable()
    trainer = CountingTrainer(is_global_zero=off != "other process")
    trainer.fit(bar)
    bar.print("nothing")
    assert bar.is_disabled and trainer.reads == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_unknown_length_has_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = CountingTrainer(batches=math.inf, epochs=1)
    trainer.fit(_EveryBatch(), steps=3)
    assert any(re.search(r"Epoch 0: \| +\| 3/\? ", line) for line in _lines(capsys.readouterr().out))
    assert convert_inf(math.inf) is None and convert_inf(math.nan) is None and convert_inf(None) is None and convert_inf(3) == 3


def test_evaluation_bars_restart_with_each_dataloader(capsys: pytest.CaptureFixture[str]) -> None:
    for stage, word in (("test", "Testing"), ("predict", "Predicting")):
        bar = TQDMProgressBar()
        CountingTrainer().evaluate(bar, stage)
        out = capsys.readouterr().out
        for loader in range(2):
            assert f"{word} DataLoader {loader}: 100%" in out
        assert getattr(bar, f"{stage}_progress_bar").n == 2


def test_overridden_metrics_and_bars(capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(_EveryBatch):
        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            items = super().get_metrics(trainer, pl_module)
            items.pop("v_num")
            return {**items, "mine": "here"}

        def init_validation_tqdm(self) -> Tqdm:
            bar = super().init_validation_tqdm()
            bar.bar_format = "my own bar"
            return bar

    trainer = CountingTrainer(epochs=1)
    trainer.loggers = [type("L", (), {"version": "a-long-version"})()]
    trainer.fit(Mine())
    out = capsys.readouterr().out
    assert "mine=here" in out and "v_num" not in out and "my own bar" in out


def test_version_of_the_logger_is_shown_and_may_be_hidden_by_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = CountingTrainer(epochs=1)
    trainer.loggers = [type("L", (), {"version": 7})()]
    bar = TQDMProgressBar()
    trainer.fit(bar)
    assert "v_num=7" in capsys.readouterr().out
    trainer.loggers = [type("L", (), {"version": "a-long-version"})()]
    assert bar.get_metrics(trainer, None)["v_num"] == "sion"
    trainer.metrics["v_num"] = torch.tensor(1.0)
    with pytest.warns(UserWarning, match=r"self\.log\('v_num', \.\.\., prog_bar=True\)"):
        assert bar.get_metrics(trainer, None)["v_num"] == 1.0


def test_print_goes_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar()
    CountingTrainer(epochs=1).fit(bar, check=lambda *_: bar.print("a", "line", sep="-"))
    assert "a-line\n" in capsys.readouterr().out


def test_leave_keeps_a_bar_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    bars = []

    class Counted(TQDMProgressBar):
        def init_train_tqdm(self) -> Tqdm:
            bars.append(super().init_train_tqdm())
            return bars[-1]

    CountingTrainer(epochs=3).fit(Counted(leave=True))
    assert len(bars) == 1 + 3
    assert [bar.n for bar in bars[1:]] == [4, 4, 4]


def test_bar_that_is_no_tqdm_of_ours_works() -> None:
    class Plain(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            return tqdm(disable=True)

    bar = Plain()
    CountingTrainer().fit(bar)
    assert bar.train_progress_bar.total == 4


def test_refresh_rate_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_MINITERS", "7")
    assert (TQDMProgressBar().refresh_rate, TQDMProgressBar(refresh_rate=9).refresh_rate) == (7, 9)
    monkeypatch.setenv("COLAB_GPU", "1")
    assert TQDMProgressBar().refresh_rate == 20


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.500"), (1.0, "1.000"), ("12", "12.00"), ("word", "word"), (7, "7"), (1e-9, "1e-9")]
)
def test_numbers_keep_their_width(number: Any, text: str) -> None:
    assert Tqdm.format_num(number) == text


def test_bar_can_be_pickled_and_names_what_is_missing() -> None:
    bar = TQDMProgressBar()
    CountingTrainer(epochs=1).fit(bar)
    bar._trainer = None
    copy = pickle.loads(pickle.dumps(bar))
    with pytest.raises(TypeError, match=r"TQDMProgressBar\.train_progress_bar"):
        _ = copy.train_progress_bar
    with pytest.raises(TypeError, match=r"TQDMProgressBar\.trainer"):
        _ = TQDMProgressBar().trainer


def test_no_hook_is_overridden_in_vain() -> None:
    """The trainer calls every overridden hook for every batch."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    overridden = {name for name in hooks if getattr(TQDMProgressBar, name) is not getattr(Callback, name)}
    assert "on_train_batch_end" in overridden
    assert not overridden & {"on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"}
