"""Calls with one module: which take the steps of the call before over, and what these keep in memory. Numbers: tests/parity."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import Callback
from torch_compat.step.mesh_step_runner import MeshStepRunner


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.scale = 1.0

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0].to(self.layer.weight.dtype)) * self.scale


class Training(Net):
    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.kind, self.settings = kind, {"lr": 0.1, **options}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.predict_step(batch, batch_idx).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.predict_step(batch, batch_idx).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), **self.settings)


class Knowing(Training):
    """One step of it knows its Trainer."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        assert self.trainer.max_epochs


class ByHand(Training):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Asking(Net):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().predict_step(batch, batch_idx) + sum(self.trainer.num_predict_batches)


def data(rows: int = 16) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(rows * 4.0).reshape(-1, 4) / 100), batch_size=8)


def trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, **quiet, **options)


def steps_of(run: Trainer) -> MeshStepRunner:
    steps = run.executor.steps
    assert isinstance(steps, MeshStepRunner)
    return steps


def takes_over(run: Trainer, net: Net, between: Callable[[], Any] = lambda: None) -> bool:
    """Whether a second call takes the steps of the first over; it gives what the module gives then."""
    run.predict(net, data())
    before = steps_of(run).kept
    between()
    rows = run.predict(net, data())
    with torch.no_grad():
        expected = [net.predict_step(batch, index) for index, batch in enumerate(data())] if type(net) is Net else rows
    torch.testing.assert_close(rows, expected)
    return steps_of(run).kept is before


def test_a_call_takes_over_what_the_last_one_knew_and_compares_what_it_read() -> None:
    net, run = Net(), trainer()
    assert takes_over(run, net)
    assert steps_of(run).log.captures == 0
    assert (steps_of(run).log.variants, steps_of(run).log.taken) == (1, 1)
    assert takes_over(run, net, lambda: setattr(net, "scale", 3.0))
    assert takes_over(run, net, lambda: net.layer.register_forward_hook(lambda module, args, output: output + 1))  # pyright: ignore


def test_nothing_is_taken_over_where_more_has_changed_than_guards_see() -> None:
    net, run = Net(), trainer()
    assert not takes_over(run, net, lambda: setattr(run, "log_every_n_steps", 7))
    assert not takes_over(run, net, lambda: setattr(net.layer, "bias", torch.nn.Parameter(torch.ones(2))))
    assert not takes_over(run, net, net.double)
    net.float()
    assert takes_over(run, net)
    torch.use_deterministic_algorithms(True)
    try:
        assert not takes_over(run, net, lambda: torch.use_deterministic_algorithms(False))
    finally:
        torch.use_deterministic_algorithms(False)


def test_steps_that_ask_the_trainer_for_objects_are_not_taken_over() -> None:
    net, run = Asking(), trainer()
    assert not takes_over(run, net)
    (row, *_), (more, *_) = run.predict(net, data(16)), run.predict(net, data(32))  # pyright: ignore
    torch.testing.assert_close(more, row + 2)


def test_nothing_is_taken_over_from_a_call_that_failed() -> None:
    class Failing(Net):
        def on_predict_end(self) -> None:
            if self.scale == 2.0:
                raise ValueError("a hook")

    net, run = Failing(), trainer()
    assert takes_over(run, net)
    net.scale = 2.0
    before = steps_of(run).kept
    with pytest.raises(ValueError, match="a hook"):
        run.predict(net, data())
    net.scale = 1.0
    run.predict(net, data())
    assert steps_of(run).kept is not before


class Heard(Callback):
    """Says nothing of its own to steps."""

    def __init__(self) -> None:
        self.batches = 0

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1


def test_another_trainer_takes_over_what_steps_have_not_asked_of_the_first() -> None:
    net, first, second = Net(), Heard(), Heard()
    run = trainer(callbacks=[first])
    run.predict(net, data())
    kept = steps_of(run).kept
    other = trainer(callbacks=[second], max_epochs=3)
    other.predict(net, data())
    assert steps_of(other).kept is kept
    assert steps_of(other).log.captures == 0
    assert first.batches == second.batches == 2
    more = trainer(callbacks=[second], precision="bf16-mixed")
    more.predict(net, data())
    assert steps_of(more).kept is not kept


def fit(net: Training, **options: Any) -> Trainer:
    run = trainer(max_epochs=1, **options)
    run.fit(net, data(), data())
    return run


def weights_after(net: Training, *changes: Callable[[], Any]) -> Tensor:
    """The weights after a fit, and one after each change, of steps that no other fit has seen."""
    torch.nn.init.ones_(net.layer.weight)
    torch.nn.init.zeros_(net.layer.bias)
    for change in (lambda: None, *changes):
        change()
        net.__dict__.pop("_kept_steps", None)
        fit(net)
    return net.layer.weight.detach().clone()


def test_a_second_fit_takes_over_its_steps_and_a_validation_those_of_the_fit() -> None:
    net = Training()
    first = fit(net)
    kept = steps_of(first).kept
    second = fit(net)
    assert steps_of(second).kept is kept
    assert (steps_of(second).log.captures, steps_of(second).log.variants, steps_of(second).log.taken) == (0, 2, 2)
    third = trainer()
    third.validate(net, data(), verbose=False)
    assert steps_of(third).kept is kept
    assert steps_of(third).log.captures == 0


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.01}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"maximize": True}, {"kind": torch.optim.Adam}],
)
def test_a_fit_with_another_optimizer_is_another_program(options: dict[str, Any]) -> None:
    """The module's attributes are the same objects: only what is made of them is another."""
    net = Training()
    choice = [torch.optim.SGD, {"lr": 0.1}]
    net.configure_optimizers = lambda: choice[0](net.parameters(), **choice[1])

    def change() -> None:
        choice[:] = [
            options.get("kind", torch.optim.SGD),
            {"lr": 0.1, **{key: one for key, one in options.items() if key != "kind"}},
        ]

    expected = weights_after(net, change)
    choice[:] = [torch.optim.SGD, {"lr": 0.1}]
    torch.nn.init.ones_(net.layer.weight)
    torch.nn.init.zeros_(net.layer.bias)
    before = steps_of(fit(net)).kept
    change()
    assert steps_of(fit(net)).kept is before
    torch.testing.assert_close(net.layer.weight.detach(), expected)


def test_of_the_steps_of_a_fit_those_are_forgotten_that_know_their_trainer_or_optimizers() -> None:
    net = Knowing()
    first, second = fit(net), fit(net)
    assert steps_of(second).kept is steps_of(first).kept
    assert steps_of(second).log.taken == 2  # of the validation the graph
    hand = ByHand()
    first, second = fit(hand), fit(hand)
    assert steps_of(second).kept is steps_of(first).kept
    validated = trainer()
    validated.validate(hand, data(), verbose=False)
    assert steps_of(validated).kept is steps_of(first).kept


def test_a_copy_of_a_module_has_no_steps_of_its_runs() -> None:
    net = Net()
    trainer().predict(net, data())
    kept = net.__dict__["_kept_steps"]
    assert "_kept_steps" not in copy.deepcopy(net).__dict__
    assert copy.deepcopy(kept).take() is None
    assert "_kept_steps" not in pickle.loads(pickle.dumps(net)).__dict__
    assert kept.take() is not None


def test_arrays_are_freed_with_the_call_steps_with_the_module_and_a_trainer_once_another_has_them() -> None:
    net = Training()
    run = fit(net)
    model, programs = weakref.ref(steps_of(run).model), weakref.ref(steps_of(run).kept.programs)
    module, old = weakref.ref(net), weakref.ref(run)
    run = trainer()
    run.predict(net, data())
    gc.collect()
    assert model() is None
    assert old() is None
    assert programs() is not None
    del net, run
    gc.collect()
    assert module() is None
    assert programs() is None
