"""Runs of one module: which graphs and programs a later run takes, and when they are freed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.run.report import ExecutorLog
from torch_compat.step import kept_graphs
from torch_compat.step.mesh_step_runner import MeshStepRunner
from xlatrain.bridge.capture import capture as capture_module
from xlatrain.bridge.capture.capture import capture
from xlatrain.step.optimizers import RULES

BATCHES = 3


class Net(LightningModule):
    """A net of one layer whose steps use what can change between runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.scale = 1.0
        self.offset = torch.zeros(2)
        self.rate = 0.1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.layer(batch[0]) + self.offset).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.layer(batch[0]).mean() * self.scale)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.layer(batch[0]) + self.offset, self.trainer.max_epochs

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def data() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(BATCHES * 8.0 * 4).reshape(-1, 4) / 100), batch_size=8)


def trainer(**options: Any) -> Trainer:
    given = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": False, "num_sanity_val_steps": 0, **options}
    return Trainer(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **given)


def log_of(run: Trainer) -> tuple[int, int, int]:
    """Graphs made, programs, and those of them that an earlier run had compiled; of the last run."""
    steps = run.executor.steps
    assert isinstance(steps, MeshStepRunner)
    log: ExecutorLog = steps.log
    return log.captures, log.variants, log.taken


def test_later_runs_take_what_earlier_ones_made() -> None:
    net, run = Net(), trainer()
    run.fit(net, data(), data())
    assert log_of(run) == (2, 2, 0)
    for _ in range(2):
        run.validate(net, data(), verbose=False)
        assert log_of(run) == (0, 1, 1)
    run.predict(net, data())
    assert log_of(run) == (1, 1, 0)
    run.predict(net, data())
    assert log_of(run) == (0, 1, 1)
    run.fit_loop.max_epochs = 2
    run.fit(net, data(), data())
    assert log_of(run) == (0, 2, 2)


def test_another_trainer_takes_them_and_reads_its_own_settings() -> None:
    net, first, second = Net(), trainer(), trainer(max_epochs=7)
    first.fit(net, data())
    first.predict(net, data())
    second.fit(net, data())
    assert log_of(second) == (0, 1, 1)
    found = second.predict(net, data())
    assert log_of(second) == (0, 1, 1)
    assert {epochs for _, epochs in found} == {7}  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]


def halve(net: Net) -> None:
    with torch.no_grad():
        net.layer.weight.mul_(0.5)


def shift(net: Net) -> None:
    net.offset.add_(1.0)


def shift_unseen(net: Net) -> None:
    net.offset.numpy()[0] = 3.0


def replace_offset(net: Net) -> None:
    net.offset = torch.zeros(2)


def scale(net: Net) -> None:
    net.scale = 2.0


def hook(net: Net) -> None:
    net.layer.register_forward_hook(lambda module, args, output: output * 2)


def widen(net: Net) -> None:
    net.layer = torch.nn.Linear(4, 2, bias=False)


@pytest.mark.parametrize(
    ("change", "validated", "predicted"),
    [(halve, 0, 0), (shift, 0, 1), (shift_unseen, 0, 1), (replace_offset, 0, 0), (scale, 1, 0), (hook, 1, 1), (widen, 1, 1)],
)
def test_what_was_edited_is_captured_anew(change: Callable[[Net], None], validated: int, predicted: int) -> None:
    net, run = Net(), trainer()
    run.validate(net, data(), verbose=False)
    run.predict(net, data())
    change(net)
    (found,) = run.validate(net, data(), verbose=False)
    assert log_of(run)[0] == validated
    rows = run.predict(net, data())
    assert log_of(run)[0] == predicted
    with torch.no_grad():
        for batch, row in zip(data(), rows, strict=True):  # pyright: ignore[reportArgumentType]
            torch.testing.assert_close(row[0], net.layer(batch[0]) + net.offset)  # pyright: ignore[reportIndexIssue, reportArgumentType]
        expected = torch.stack([net.layer(batch[0]).mean() * net.scale for batch in data()]).mean()
    assert found["val"] == pytest.approx(float(expected), rel=1e-5, abs=1e-7)  # terms of opposite signs


def test_other_settings_of_the_update_need_another_program() -> None:
    net = Net()
    first, clipped, guarded = trainer(), trainer(gradient_clip_val=0.1), trainer(accumulate_grad_batches=2)
    first.fit(net, data())
    clipped.fit(net, data())
    assert log_of(clipped) == (0, 1, 0)
    guarded.fit(net, data())
    assert log_of(guarded)[2] == 0
    net.rate = 0.2  # a number of the optimizer is an input
    last = trainer()
    last.fit(net, data())
    assert log_of(last) == (0, 1, 1)


def test_another_mesh_needs_other_programs() -> None:
    net, one, two = Net(), trainer(), trainer(devices=2)
    one.predict(net, data())
    two.predict(net, data())
    assert log_of(two)[2] == 0
    one.predict(net, data())
    assert log_of(one) == (0, 1, 1)


def test_steps_that_do_something_once_are_the_same_in_every_run() -> None:
    class Lists(Net):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if not hasattr(self, "seen"):
                self.seen: list[Any] = []
            self.seen.append((batch_idx, self.layer(batch[0]).sum()))

        def on_validation_epoch_end(self) -> None:
            totals.append([(index, round(float(value), 4)) for index, value in self.seen])
            del self.seen

    totals: list[Any] = []
    net, run = Lists(), trainer()
    for _ in range(3):
        run.validate(net, data(), verbose=False)
    assert len(totals[0]) == BATCHES and totals[0] == totals[1] == totals[2]


def test_programs_are_freed_with_their_module() -> None:
    net, run = Net(), trainer()
    run.fit(net, data(), data())
    run.predict(net, data())
    layer, optimizer = weakref.ref(net.layer), weakref.ref(run.optimizers[0])
    gone = weakref.ref(run)
    del run
    net.trainer = None
    gc.collect()
    assert gone() is None and optimizer() is None  # the trainer, while the module and its programs are there
    del net
    gc.collect()
    assert layer() is None


class Compiled:
    """Counts the programs that XLA compiles or JAX reads from its cache."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def by_hand(net: Net, loader: DataLoader) -> Tensor:
    """The prediction for the first batch after training in plain torch."""
    optimizer = net.configure_optimizers()
    for batch in loader:
        optimizer.zero_grad()
        net.layer(batch[0]).add(net.offset).pow(2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return net.layer(next(iter(loader))[0]) + net.offset


def test_the_modules_of_a_cross_validation_have_the_programs_of_the_first() -> None:
    counts, compiled = [], Compiled()
    try:
        for fold in range(5):
            torch.manual_seed(fold)
            net, before = Net(), compiled.count
            expected = by_hand(copy.deepcopy(net), data())
            run = trainer()
            run.fit(net, data(), data())
            fitted = log_of(run)
            found: Any = run.predict(net, data())
            torch.testing.assert_close(found[0][0], expected)
            counts.append((fitted, log_of(run), compiled.count - before))
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
    assert counts[0][:2] == ((2, 2, 0), (1, 1, 0)) and counts[0][2] > 0
    assert counts[1:] == 4 * [((0, 2, 2), (0, 1, 1), 0)]


def test_a_tensor_from_outside_is_that_of_the_module_that_takes_the_graph() -> None:
    first, second, run = Net(), Net(), trainer()
    run.predict(first, data())
    run.predict(second, data())
    assert log_of(run) == (0, 1, 1)
    for change in (shift, shift_unseen):  # between the calls of a module that has taken its graph
        first.offset.sub_(1.0)
        change(second)
        rows: Any = run.predict(second, data())
        with torch.no_grad():
            torch.testing.assert_close(rows[0][0], second.layer(next(iter(data()))[0]) + second.offset)


def freeze(net: Net) -> None:
    net.layer.bias.requires_grad_(False)


def grow(net: Net) -> None:
    net.layer = torch.nn.Linear(4, 3)
    net.offset = torch.zeros(3)


def enlarge(net: Net) -> None:
    """An offset whose memory is too large to be looked at in each capture."""
    net.offset = torch.zeros(2, 1 << 14)[:, 0]


def in_a_closure(by: float) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        net.layer.register_forward_hook(lambda module, args, output: output * by)

    return change


@pytest.mark.parametrize("change", [shift, shift_unseen, hook, widen, freeze, grow, enlarge, in_a_closure(3.0)])
def test_another_module_that_does_something_else_has_its_own_programs(change: Callable[[Net], None]) -> None:
    first, second, run = Net(), Net(), trainer()
    in_a_closure(2.0)(first)
    run.fit(first, data())
    in_a_closure(2.0)(second)
    change(second)
    expected = by_hand(copy.deepcopy(second), data())
    run = trainer()
    run.fit(second, data())
    assert log_of(run)[::2] == (1, 0)
    found: Any = run.predict(second, data())
    torch.testing.assert_close(found[0][0], expected)


@pytest.mark.parametrize(
    "offset", [torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t(), torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0])[1:].view(2, 2)]
)
def test_tensors_of_equal_values_may_lie_otherwise_in_memory(offset: Tensor) -> None:
    class Strided(Net):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.offset.as_strided((3,), (1,), 0) + batch[0].new_zeros(3)

    first, second, run = Strided(), Strided(), trainer()
    first.offset, second.offset = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), offset
    for net in (first, second):
        found: Any = run.predict(net, data())
        assert found[0].tolist() == net.offset.as_strided((3,), (1,), 0).tolist()


def test_modules_of_another_class_have_the_programs_of_the_same_ops() -> None:
    class Again(Net):
        pass

    run = trainer()
    run.fit(Net(), data())
    run = trainer()
    run.fit(Again(), data())
    assert log_of(run) == (0, 1, 1)


def test_an_audit_is_of_one_module() -> None:
    first = kept_graphs.KeptGraph(capture(lambda x: x + 1, torch.zeros(2)), ())
    first.note_audited("all that it does", 16)
    second = first.of_others(())
    assert second is not None and first.audited("all that it does") == 16
    assert second.audited("all that it does") == 0


def test_only_the_last_graphs_outlive_their_modules() -> None:
    for width in range(2, 12):
        net = Net()
        net.layer, net.offset = torch.nn.Linear(4, width), torch.zeros(width)
        trainer(limit_predict_batches=1).predict(net, data())
    assert len(kept_graphs.OF_ALL) == 8


@pytest.mark.parametrize("name", sorted(RULES))
def test_initial_states_need_the_named_options_only(name: str) -> None:
    import jax.numpy as jnp

    rule = RULES[name]()  # pyright: ignore[reportAbstractUsage]
    defaults = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))]).defaults
    param = jnp.ones((2, 2))
    given, all_options = rule.init(param, dict(rule.initial(defaults))), rule.init(param, defaults)
    assert {key: value.tolist() for key, value in given.items()} == {key: value.tolist() for key, value in all_options.items()}


def test_the_graph_that_tells_that_a_step_is_another_is_that_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    make = capture_module._traced
    monkeypatch.setattr(capture_module, "_traced", lambda *args: traced.append(None) or make(*args))

    class Scaled:
        @staticmethod
        def of(x: Tensor) -> Tensor:
            return x * 1.0

    class Changing(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return Scaled.of(super().training_step(batch, batch_idx))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step >= BATCHES:
                before = Scaled.of
                Scaled.of = staticmethod(lambda x: before(x) * 0.5)

    run = trainer(max_epochs=2)
    run.fit(Changing(), data())
    assert (log_of(run)[:2], len(traced)) == ((1 + BATCHES, 1 + BATCHES), 1 + BATCHES)
