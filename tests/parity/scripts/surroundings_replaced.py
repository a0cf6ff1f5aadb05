"""Hooks that replace functions and methods in mid-run, or write past ``setattr``, at a step of their own each."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from basics import Regression, regression_data
from recording import Run, case
from torch import Tensor, nn


class Scale:
    """Not a module."""

    def of(self, loss: Tensor) -> Tensor:
        return loss


class Parts(Regression):
    """Each part of its loss is found in another place."""

    scaled_by: Tensor
    penalty: float

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.power = Scale(), 1.0
        self.acts = nn.ModuleDict({"first": nn.Identity(), "second": nn.Sequential(nn.Identity(), nn.Linear(2, 2))})
        self.criterion = nn.L1Loss()
        self.long = torch.ones(40_000)
        self.register_buffer("scaled_by", torch.ones(()))

    @staticmethod
    def weight(loss: Tensor) -> Tensor:
        return loss

    @property
    def factor(self) -> float:
        return 1.0

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.layer(x)
        for act in self.acts.values():
            out = act(out)
        loss = F.mse_loss(out, y) + 0.1 * self.criterion(out, y)
        loss = self.scale.of(self.weight(loss * self.factor)) ** self.power * self.long[0] + self.long[20_000] - 1
        if hasattr(self, "penalty"):
            loss = loss + self.penalty * self.layer.weight.square().sum() * getattr(self, "shrinking", torch.ones(1)).mean()
        return loss * self.scaled_by


def halved(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 0.5


def fit_changing(run: Run, changes: list[Callable[[Any], Any]], kind: type[Parts] = Parts) -> None:
    """A change before each step but the first three."""

    class Changing(kind):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if 3 <= self.global_step < 3 + len(changes):
                changes[self.global_step - 3](self)

    before = [(owner, name, vars(owner)[name]) for owner, name in REPLACED]
    try:
        run.fit(Changing(), run.trainer(max_epochs=2), run.loader(*regression_data(16 * 8)))
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


REPLACED = [
    *((Parts, "loss"), (Parts, "weight"), (Parts, "factor"), (Scale, "of"), (F, "mse_loss"), (F, "l1_loss")),
    *((F, "linear"), (nn.Linear, "forward")),
]


@case
def functions_replaced(run: Run) -> None:
    twice = halved(halved(F.mse_loss))
    fit_changing(
        run,
        [
            lambda model: setattr(Parts, "loss", halved(Parts.loss)),
            lambda model: setattr(Parts, "weight", staticmethod(lambda loss: loss * 3)),
            lambda model: setattr(Parts, "factor", property(lambda self: 0.5)),
            lambda model: setattr(Scale, "of", lambda self, loss: loss * 2),
            lambda model: setattr(F, "mse_loss", twice),
            lambda model: setattr(F, "l1_loss", halved(F.l1_loss)),
            lambda model: setattr(nn.Linear, "forward", halved(nn.Linear.forward)),
            lambda model: setattr(F, "linear", halved(F.linear)),
            lambda model: setattr(model, "loss", types.MethodType(lambda self, batch: Parts.loss(self, batch) * 2, model)),
            lambda model: setattr(type(model), "training_step", lambda self, batch, batch_idx: self.loss(batch) * 0.1),
            lambda model: setattr(model, "training_step", lambda batch, batch_idx: model.loss(batch) * 5),
        ],
    )


@case
def changed_for_some_batches(run: Run) -> None:
    """The first step after the change does not read it."""
    weights = {"odd": 1.0}

    class OfSome(Parts):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            return loss * weights["odd"] if batch_idx % 2 == 1 else loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                weights["odd"] = 3.0

    run.fit(OfSome(), run.trainer(max_epochs=1), run.loader(*regression_data(16 * 8)))


@case
def callbacks_that_go_back(run: Run) -> None:
    """An attribute of a callback has a value of before again."""

    class Switch(pl.Callback):
        kind = "sum"

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2 == 0:
                self.kind = "mean" if batch_idx % 4 == 2 else "sum"

    switch = Switch()

    class Switched(Parts):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (2.0 if switch.kind == "sum" else 1.0)

    run.fit(Switched(), run.trainer(max_epochs=1, callbacks=[switch]), run.loader(*regression_data(16 * 8)))


@case
def written_past_setattr(run: Run) -> None:
    second: Any = None

    def drop(model: Any) -> None:
        nonlocal second
        second = model.acts.pop("second")

    fit_changing(
        run,
        [
            lambda model: model.__dict__.update(power=0.5),
            lambda model: model.acts._modules.update(first=nn.Tanh()),
            lambda model: model.acts["second"].register_forward_hook(lambda module, args, output: output * 0.5),
            lambda model: model.acts["second"]._forward_hooks.clear(),
            lambda model: model.layer._forward_pre_hooks.update({0: lambda module, args: (args[0] * 0.5,)}),
            lambda model: model.layer.__dict__.update(forward=lambda x: F.linear(x, model.layer.weight) * 0.5),
            drop,
            lambda model: model.acts["first"]._modules.update(second=second),
            lambda model: model.__dict__.update(criterion=lambda a, b: (a - b).square().mean()),
            lambda model: model.long.numpy().__setitem__(0, 0.5),
            lambda model: model.long.data.mul_(0.5),
            lambda model: (setattr(model, "penalty", 0.1), setattr(model, "scaled_by", torch.tensor(0.7))),
            lambda model: model.register_buffer("shrinking", torch.full((2,), 0.5)),
        ],
    )


@case
def parameter_assigned(run: Run) -> None:
    """Which the optimizer does not know."""

    def change(model: Any) -> None:
        model.layer.weight = nn.Parameter(model.layer.weight.detach() * 0.5)

    fit_changing(run, [change])


@case
def optimizer_state_changed(run: Run) -> None:
    """By hooks, which also give a loss its class weights late, and put a hook on a parameter."""
    kept: dict[str, Any] = {}

    def scale(model: Any) -> None:
        for state in model.trainer.optimizers[0].state.values():
            state["exp_avg_sq"].mul_(4)
            state["exp_avg"].zero_()

    class Weighted(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.classes = nn.CrossEntropyLoss()

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return F.mse_loss(self.layer(x), y) + self.classes(self.layer(x), y.argmax(1))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.02)

    weight = {"classes": (0.2, 1.8), "again": (1.5, 0.5)}
    changes: list[Callable[[Any], Any]] = [
        scale,
        lambda model: kept.update(state=copy.deepcopy(model.trainer.optimizers[0].state_dict())),
        lambda model: model.trainer.optimizers[0].state.pop(model.layer.weight),
        lambda model: model.trainer.optimizers[0].load_state_dict(kept["state"]),
        lambda model: setattr(model.classes, "weight", torch.tensor(weight["classes"])),
        lambda model: setattr(model.classes, "weight", torch.tensor(weight["again"])),
        lambda model: kept.update(hook=model.layer.weight.register_hook(lambda grad: grad * 0)),
        lambda model: kept["hook"].remove(),
    ]
    fit_changing(run, changes, Weighted)


@case
def optimizers_assigned(run: Run) -> None:
    def change(model: Any) -> None:
        model.trainer.optimizers = [torch.optim.Adam(model.parameters(), 0.01)]

    fit_changing(run, [change])


class Counting(Regression):
    """Counts its steps in a buffer, and weighs its loss with them."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        if self.training:
            self.count += 1
        return super().loss(batch) * self.count

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.count = torch.tensor(3.0)


@case
def buffer_assigned_that_is_equal(run: Run) -> None:
    """The one that the module has now counts on, not the one that it had."""
    run.fit(Counting(), run.trainer(max_epochs=1), run.loader(*regression_data(16 * 8)))
