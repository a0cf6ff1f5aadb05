"""Calls of one Trainer: which take the steps of the call before over, and what these keep in memory. Numbers: tests/parity."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.step.mesh_step_runner import MeshStepRunner


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.scale = 1.0

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0].to(self.layer.weight.dtype)) * self.scale


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


def test_arrays_are_freed_with_the_call_and_steps_with_module_and_trainer() -> None:
    net, run = Net(), trainer()
    run.predict(net, data())
    model, programs = weakref.ref(steps_of(run).model), weakref.ref(steps_of(run).kept.programs)
    module = weakref.ref(net)
    run.predict(net, data())
    gc.collect()
    assert model() is None
    run.predict(Net(), data())
    gc.collect()
    assert programs() is None
    del net
    gc.collect()
    assert module() is None
