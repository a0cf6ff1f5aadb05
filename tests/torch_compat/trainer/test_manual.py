"""Manual optimization: what a compiled step refuses, by name, file and line; where the eager steps go on from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import Callback
from torch_compat.step.update.gradient_readers import reads_gradients_between_steps


class Manual(LightningModule):
    """A layer; ``after`` is called with the module, its optimizer, scheduler and loss after the optimizer's step."""

    def __init__(self, after: Callable[..., Any] | None = None, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(4, 1)
        self.after = after
        self.make = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()

        def closure() -> Tensor:
            loss = (self.layer(batch[0]) - batch[1]).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        loss = optimizer.step(closure)
        if self.after is not None:
            self.after(self, optimizer, schedule, loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def fit(model: LightningModule, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    trainer = Trainer(**{"accelerator": "cpu", "devices": 1, "max_steps": 2, **quiet, **options})
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(32, 4), torch.ones(32, 1)), batch_size=16))
    return trainer


def plateau(module: Any, optimizer: Any, schedule: Any, loss: Any) -> None:
    schedule.step(loss)


def branch(module: Any, optimizer: Any, schedule: Any, loss: Any) -> None:
    schedule.step()
    if optimizer.param_groups[0]["lr"] < 0.01:
        module.layer.bias.data.zero_()


def moments(module: Any, optimizer: Any, schedule: Any, loss: Any) -> None:
    module.log("moments", sum(len(state) for state in optimizer.state.values()))


def rate(module: Any, optimizer: Any, schedule: Any, loss: Any) -> None:
    optimizer.param_groups[0]["lr"] = loss * 0.1


def new_group(module: Any, optimizer: Any, schedule: Any, loss: Any) -> None:
    optimizer.param_groups.append({"params": [], "lr": 1.0})


def of_scheduler(module: Any, optimizer: Any, schedule: Any, loss: Any) -> None:
    schedule.gamma = 0.9


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (plateau, r"test_manual.py:\d+: schedule.step\(loss\)\n.*gives lr_schedulers\[0\].step's argument a tensor"),
        (branch, r"test_manual.py:\d+: if optimizer.*\n.*depends on optimizers\[0\].param_groups\[0\]\['lr'\], which it changed"),
        (moments, r"test_manual.py:\d+: module.log.*\n.*reads or writes optimizers\[0\].state"),
        (rate, r"gives optimizers\[0\].param_groups\[0\]\['lr'\] a tensor"),
        (new_group, "adds parameters or groups to SGD"),
        (of_scheduler, r"changes lr_schedulers\[0\].gamma of ExponentialLR"),
    ],
)
def test_what_cannot_be_compiled_is_named(after: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    model = Manual(after)
    with pytest.raises(Exception, match=expected):
        fit(model)
    optimizer = model.optimizers(use_pl_optimizer=False)
    assert optimizer.param_groups[0]["lr"] == 0.1 and len(optimizer.param_groups) == 1  # as before the capture


def test_optimizers_for_eager_steps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    with pytest.raises(Exception, match="LBFGS cannot run inside a compiled step"):
        fit(Manual(optimizer=torch.optim.LBFGS))
    with pytest.raises(Exception, match="SparseAdam cannot run inside a compiled step"):
        fit(Manual(optimizer=torch.optim.SparseAdam))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"gradient_clip_val": 0.5}, r"gradient clipping is not supported for manual optimization.*gradient_clip_val=0.5"),
        ({"accumulate_grad_batches": 2}, r"gradient accumulation is not supported for .*accumulate_grad_batches=2"),
    ],
)
def test_what_automatic_optimization_does_is_refused(option: dict[str, Any], expected: str) -> None:
    with pytest.raises(Exception, match=expected):
        fit(Manual(), **option)


def test_a_scheduler_steps_once_where_the_step_runs_eagerly_after_all() -> None:
    def after(module: Any, optimizer: Any, schedule: Any, loss: Any) -> None:
        schedule.step()
        rate = optimizer.param_groups[0]["lr"]
        module.rates = [*getattr(module, "rates", []), float(rate) if rate > 0 else 0.0]  # a branch on what the step changed

    model = Manual(after)
    with pytest.warns(UserWarning, match=r"Steps run eagerly .*test_manual.py"):
        trainer = fit(model, max_steps=3, max_epochs=2)
    assert model.rates == [0.05, 0.025, 0.0125]
    assert trainer.global_step == 3


@pytest.mark.parametrize(("asks", "programs"), [(False, 1), (True, 2)])
def test_gradients_that_are_cleared_first_need_no_program_of_their_own(asks: bool, programs: int) -> None:
    class Clearing(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            scale = 3.0 if asks and self.layer.weight.grad is None else 1.0
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = (self.layer(batch[0] / 2) - batch[1]).pow(2).mean() * scale
            self.manual_backward(loss)
            optimizer.step()
            return loss

    model = Clearing()
    weight = model.layer.weight.detach().clone().requires_grad_()
    bias = model.layer.bias.detach().clone().requires_grad_()
    steps = fit(model, max_epochs=2, max_steps=4).executor.steps
    assert steps is not None
    log = steps.log
    assert (log.variants, len(log.recompilations)) == (programs, programs - 1)
    for step in range(4):
        loss = (torch.ones(16, 4) / 2 @ weight.T + bias - 1).pow(2).mean() * (3.0 if asks and step == 0 else 1.0)
        gradients = torch.autograd.grad(loss, [weight, bias])
        with torch.no_grad():
            weight -= 0.1 * gradients[0]
            bias -= 0.1 * gradients[1]
    torch.testing.assert_close([*model.parameters()], [weight, bias])


def test_hooks_that_read_gradients_between_steps_are_found() -> None:
    class Reader(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.helper(pl_module)

        def helper(self, module: Any) -> list[Any]:
            return [p.grad for p in module.parameters()]

    class Other(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            pl_module.zero_grad()

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            Reader().helper(pl_module)

    class Held(Callback):
        """Has class attributes that are no functions."""

        weights = torch.ones(3)
        array = np.ones(3)

        def on_train_batch_end(self, *args: Any) -> None:
            print(self.weights, self.array)

    assert not reads_gradients_between_steps(Held(), frozenset())
    wrapped = Held()
    hook = functools.wraps(Held.on_train_end)(lambda trainer, module: module.layer.weight.grad)
    wrapped.on_train_end = functools.partial(hook)
    assert reads_gradients_between_steps(wrapped, frozenset())
    assert reads_gradients_between_steps(Reader(), frozenset())
    assert not reads_gradients_between_steps(Other(), frozenset({"on_after_backward"}))
