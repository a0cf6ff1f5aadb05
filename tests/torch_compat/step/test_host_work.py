"""Host work of a step's Python: host futures, draws, texts of the batch, calls that wait."""

# ruff: noqa: UP031, UP032
# Python's older ways to format are what some of these are about.

from __future__ import annotations

import copy
import itertools
import json
import logging
import operator
import random
import re
import textwrap
import warnings
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from torch_compat import LightningModule, Trainer
from torch_compat.step.effects.recorder import EffectRecorder
from torch_compat.step.host.callback_queue import PendingCalls, StepCalls
from torch_compat.step.host.calls import HostCall, HostCalls
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.percent import percent
from torch_compat.step.host.streams import RecordedStream
from torch_compat.step.values import policy
from torch_compat.step.values.user_objects import containers_around
from xlatrain.bridge.errors import CaptureError

OUTSIDE: list[int] = []


def results_of(calls: HostCalls) -> list[Any]:
    """Make the recorded calls, places filled with results."""
    results: list[Any] = []

    def fill(leaf: Any) -> Any:
        return leaf.slot().find(results) if type(leaf) is HostFuture else leaf

    for call in calls.calls:
        args = [fill(arg) for arg in call.args]
        results.append(call.function(*args, **call.kwargs))
    return results


def test_whatever_is_computed_from_a_deferred_value_is_deferred() -> None:
    calls = HostCalls()
    value: Any = HostFuture(calls, calls.record(lambda: 3.0, text="three"), like=0.0)
    derived = [2 * value + 1, round(value / 7, 2), -value, value**2, torch.full((2,), 2.0) * value, np.sqrt(value)]
    found = results_of(calls)
    numbers = [one.slot().find(found) for one in derived]
    assert numbers[:4] == [7.0, 0.43, -3.0, 9.0]
    assert numbers[4].tolist() == [6.0, 6.0]
    assert numbers[5] == pytest.approx(3**0.5)


def test_a_deferred_value_passes_for_what_it_will_be() -> None:
    calls = HostCalls()
    place = calls.record(dict, text="dict")
    value: Any = HostFuture(calls, place, like={"a": torch.zeros(2, 3), "b": [1, 2]})
    assert isinstance(value, dict) and list(value) == ["a", "b"] and "a" in value and len(value["b"]) == 2
    assert isinstance(value["a"], Tensor) and value["a"].shape == (2, 3)
    with pytest.raises(KeyError):
        _ = value["c"]
    with pytest.raises(AttributeError):
        _ = value["a"].no_such_thing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "use",
    [bool, int, float, hash, len, list, np.asarray, lambda v: [0, 1][v], lambda v: v in {1}, lambda v: max(v, 1)],
)
def test_a_use_that_needs_the_value_is_refused_even_if_the_user_catches_it(use: Any) -> None:
    calls = HostCalls()
    value = HostFuture(calls, calls.record(lambda: 1.0, text="one"))
    with pytest.raises(CaptureError, match=r"test_host_work\.py:\d+"):
        use(value)
    with pytest.raises(CaptureError):
        calls.finish(lambda tree: tree)


def test_a_text_that_the_step_looks_at_is_refused() -> None:
    calls = HostCalls()
    value = HostFuture(calls, calls.record(lambda: 0.25, text="quarter"))
    printed, dropped = f"loss {value:.1f}!", f"{value}"
    slot: Any = calls.text_slot(printed)
    assert slot.find([0.25]) == "loss 0.2!"
    with pytest.raises(CaptureError, match="formats the value of a tensor"):
        calls.check_texts()
    with pytest.raises(CaptureError, match=r"test_host_work\.py:\d+"):
        _ = dropped == "0.25"
    with pytest.raises(CaptureError, match="formats the value of a tensor"):  # also where the user catches it
        calls.check_refused()


def call_of(metric: Any, value: float) -> HostCall:
    return HostCall(metric.update, (value,), {}, "update", None, (metric,))


def test_waiting_calls_are_made_when_somebody_looks() -> None:
    pending, metric = PendingCalls(lag=4), SumMetric()
    kind = type(metric)
    for call in [call_of(metric, float(number)) for number in range(1, 4)]:
        pending.add(StepCalls([call], lambda tree: tree))
    assert object.__getattribute__(metric, "sum_value") == 0
    assert isinstance(metric, SumMetric)
    assert metric.compute() == 6
    assert type(metric) is kind


def test_no_more_than_the_lag_waits_and_nothing_after_the_run() -> None:
    pending, metric = PendingCalls(lag=4), MeanMetric()
    with pending.running():
        for call in [call_of(metric, float(number)) for number in range(7)]:
            pending.add(StepCalls([call], lambda tree: tree))
            assert len(pending._waiting) <= 4
    assert object.__getattribute__(metric, "_update_count") == 7
    assert metric.compute() == 3


def test_a_call_with_other_effects_is_made_at_once_and_in_order() -> None:
    pending, metric, seen = PendingCalls(lag=4), SumMetric(), []
    first, second = call_of(metric, 1.0), call_of(metric, 2.0)
    pending.add(StepCalls([first], lambda tree: tree))
    shout = HostCall(lambda: seen.append(float(metric.compute())), (), {}, "append", None, ())
    pending.add(StepCalls([shout, second], lambda tree: tree))
    assert seen == [1.0]
    assert metric.compute() == 3


def test_an_error_of_a_late_call_names_the_users_line() -> None:
    def fail() -> None:
        raise ValueError("bad target")

    pending = PendingCalls(lag=0)
    call = HostCall(fail, (), {}, "fail", "script.py:7: self.acc(x, y)", ())
    with pytest.raises(ValueError, match="bad target") as caught:
        pending.add(StepCalls([call], lambda tree: tree))
    assert "script.py:7: self.acc(x, y)" in caught.value.__notes__[0]


def test_collections_of_the_script_and_of_closures_are_followed() -> None:
    enclosed: dict[str, int] = {}

    class Step(nn.Module):
        def step(self) -> None:
            OUTSIDE.append(1)
            enclosed["a"] = 2

    step = Step()
    OUTSIDE.clear()
    recorder = EffectRecorder({"self": step, **containers_around([step])})
    with recorder.recording() as recording:
        step.step()
    assert (OUTSIDE, enclosed) == ([], {})
    recording.effects(lambda tree: tree).replay(recorder.roots, lambda tree: tree)
    assert (OUTSIDE, enclosed) == ([1], {"a": 2})


def test_a_counter_is_put_back_to_what_it_was() -> None:
    holder = nn.Module()
    holder.counts = Counter(a=2)
    with EffectRecorder({"self": holder}).recording():
        holder.counts["a"] += 1
    assert holder.counts == {"a": 2}


class Drawing(LightningModule):
    """Draws, reads texts, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.generator = np.random.default_rng(5)
        self.seen: list[Any] = []
        self.rate = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch["x"]).pow(2).mean()
        self.seen.append([random.random(), self.generator.normal(1.0), batch["name"][0], self.rate])
        return loss * (2 if batch["kind"][0] == "odd" else 1) * self.rate

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rate *= 0.5

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def test_draws_texts_and_changing_numbers_are_those_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    rows = [{"x": torch.ones(4), "name": f"row {i}", "kind": "odd" if i // 2 % 2 else "even"} for i in range(12)]
    model = Drawing()
    random.seed(11)
    expected_python, expected_numpy = random.Random(11), np.random.default_rng(5)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **options)
    trainer.fit(model, DataLoader(rows, batch_size=2))
    assert model.seen == [[expected_python.random(), expected_numpy.normal(1.0), f"row {2 * i}", 0.5**i] for i in range(6)]
    assert random.random() == expected_python.random()
    assert trainer.executor.steps is not None
    assert trainer.executor.steps.log.variants <= 4  # odd and even, before and after the rate became an input


def test_texts_by_percent_are_made_after_the_step() -> None:
    calls = HostCalls()
    value: Any = HostFuture(calls, calls.record(lambda: 2.5, text="two and a half"), like=0.0)
    text = percent("%5.2f is %s, or %d%%", (value, value, value), is_said=False)
    slot: Any = calls.text_slot(text)
    assert slot.find(results_of(calls)) == " 2.50 is 2.5, or 2%"
    named: Any = calls.text_slot(percent("%(x).1f and %(y)s", {"x": value, "y": "that"}, is_said=False))
    assert named.find(results_of(calls)) == "2.5 and that"
    with pytest.raises(TypeError, match="not all arguments converted"):
        percent("%s", (value, value), is_said=False)
    assert percent("%d of %s", (1, "two"), is_said=True) == "1 of two"


def caught(look: Any) -> Any:
    try:
        return look()
    except Exception:
        return "an exception"


LOOKS: dict[str, Any] = {
    "a slice": lambda text: text[:2],
    "an entry": lambda text: operator.itemgetter(0)(text),
    "compared": lambda text: text == "2",
    "compared in a list": lambda text: [text] == ["2.00"],
    "a length": lambda text: len(",".join(["a", text])),
    "sorted": lambda text: sorted([text, "19", "3"]),
    "the least": lambda text: min(text, "19"),
    "iterated": lambda text: "-".join(c for c in text),
    "unpacked": lambda text: (lambda first, *rest: (first, rest))(*text),
    "contains": lambda text: ("0" in text, text in "2.005", text in ["2.00"]),
    "a key": lambda text: list({text: 1}),
    "a key that is stored": lambda text: [kept := {}, kept.__setitem__(text, 1)][0],
    "a key that is asked for": lambda text: {"2.00": 1}.get(text),
    "in a set": lambda text: len({text, "2.00"}),
    "counted": lambda text: Counter([text, "2.00"])["2.00"],
    "a method's text": lambda text: "2.005".startswith(text),
    "a method of the class": lambda text: str.zfill(text, 9),
    "by a library": lambda text: textwrap.fill(f"a {text}", 3),
    "by a function of C": lambda text: re.sub("0", "1", text),
    "as data": lambda text: json.dumps([text]),
    "a number": lambda text: int(float(text)),
    "in an array": lambda text: np.array([text, "longer"]).tolist(),
    "by a function that is given": lambda text: list(map(str.isdigit, [text, "2"])),
    "as a path": lambda text: str(Path("a") / text),
    "caught": lambda text: caught(lambda: text[:1]),
}
KEEPS: dict[str, Any] = {
    "padded": lambda text: text.rjust(9) + text.center(9, "*") + text.zfill(9),
    "padded by a specification": lambda text: f"{text:>9}|{text!r:<9}|" + "{:^9}|{!r}".format(text, text) + format(text, "9"),
    "padded by percent": lambda text: "%9s|%-9s|%*s|%r" % (text, text, 9, text, text) + "%(a)9s" % {"a": text},
    "put together": lambda text: "a" + text + "b" * 2 + text * 2 + ", ".join([text, *map(str.strip, ["c "]), text]),
    "in containers": lambda text: str([text, (text,), {"a": text}]),
    "asked for its class": lambda text: f"{type(text).__name__} {isinstance(text, str)} {text or 'none'} {text is None}",
    "upper": lambda text: f"e{text}".upper(),
    "passed on": lambda text: "".join(itertools.chain([text], copy.copy([text]), deque([text]))),
}


class Looking(LightningModule):
    def __init__(self, look: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.look = look
        self.found: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).mean() * 0 + batch.mean()
        text = f"{loss.detach():.2f}"
        print(text)
        self.found.append(self.look(text))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def run(self) -> None:
        options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_model_summary=False, **options)
        data: Any = torch.tensor([[2.0, 2.0], [30.0, 30.0]])
        trainer.fit(self, DataLoader(data, 1))


@pytest.mark.parametrize("look", LOOKS)
def test_a_text_that_is_looked_at_makes_a_step_eager(look: str) -> None:
    model = Looking(LOOKS[look])
    with pytest.warns(UserWarning, match=r"test_host_work.py:\d+[^\n]*\n[^\n]*formats the value of a tensor"):
        model.run()
    assert model.found == [LOOKS[look](text) for text in ("2.00", "30.00")]


@pytest.mark.parametrize("look", KEEPS)
def test_a_text_that_is_kept_or_put_into_others_is_that_of_each_step(look: str) -> None:
    model = Looking(KEEPS[look])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Steps run eagerly")
        model.run()
    assert model.found == [KEEPS[look](text) for text in ("2.00", "30.00")]


DROPS: dict[str, Any] = {
    "alone": lambda text, loss, n: None,
    "in a dict": lambda text, loss, n: {"loss": text}["loss"] is None,
    "padded": lambda text, loss, n: text.rjust(9) + f"{text:>9}" + "%9s" % text is None,
    "put together": lambda text, loss, n: ", ".join([text, f"{n}", *(f"{one}: {text}" for one in "ab")]) is None,
    "a number's": lambda text, loss, n: str(loss.item()) + "%.2f" % loss.item() + "{:.2f}".format(loss.item()) is None,
    "a tensor's": lambda text, loss, n: str(loss) + repr(loss) is None,
    "of an exception": lambda text, loss, n: n > 5 and ValueError(text) and None,
    "now and then": lambda text, loss, n: text if n == 1 else None,
    "said now and then": lambda text, loss, n: print(f"{n}: {text}") if n == 1 else None,
    "at a level that says nothing": lambda text, loss, n: logging.getLogger("of a test").debug(text),
}


class Dropping(Looking):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).mean() * 0 + batch.mean()
        self.found.append(self.look(f"{loss.detach():.2f}", loss.detach(), batch_idx))
        return loss


@pytest.mark.parametrize("look", DROPS)
def test_a_text_that_nobody_wants_is_dropped(look: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Dropping(DROPS[look])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Steps run eagerly")
        model.run()
    said = capsys.readouterr().out
    assert model.found == [DROPS[look](f"{value:.2f}", torch.tensor(value), n) for n, value in enumerate((2.0, 30.0))]
    assert said == capsys.readouterr().out


def test_streams_say_after_the_step_what_the_users_code_writes(capsys: pytest.CaptureFixture[str]) -> None:
    calls = HostCalls()
    stream = RecordedStream("stdout", calls)
    stream.write("later")
    assert not capsys.readouterr().out and len(calls.calls) == 1
    results_of(calls)
    assert capsys.readouterr().out == "later"


class Frame:
    """As pandas has its tables: what it holds is out of a capture's reach."""

    def __init__(self) -> None:
        self.asked = itertools.count(1)

    def ask(self) -> int:
        return next(self.asked)


def test_an_object_whose_changes_cannot_be_taken_back_is_not_touched_by_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "KEPT_IN_C", frozenset({f"{__name__}.Frame"}))
    frame = Frame()
    model = Looking(lambda text: frame.ask())
    with pytest.warns(UserWarning, match=r"it uses a Frame, of which a capture could not take back"):
        model.run()
    assert model.found == [1, 2]
