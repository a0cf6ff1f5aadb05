"""A Trainer that is called again with one module: what is changed between two calls counts, whatever it is."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from basics import Regression, regression_data
from recording import Run, case, main
from torch import Tensor, nn
from torch.utils.data import DataLoader

ALPHA = 1.0
CONFIG = types.SimpleNamespace(beta=1.0, table=[1.0, {"deep": 1.0}])


def helper(x: Tensor) -> Tensor:
    return x


def closed(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


class Settings:
    gamma = 1.0


class Part(nn.Module):
    """A layer with an attribute of its own, and one of its class."""

    kind = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.layer = nn.Linear(8, 2)
        self.power = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.dropout(x)) ** self.power * self.kind


class Reading(Regression):
    """Steps that read what can change between two calls."""

    delta = 1.0
    rate = 0.001

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.act: nn.Module = nn.Identity()
        self.scaled = closed(1.0)
        self.outside = torch.ones(2)
        self.options = {"a": [1.0]}
        self.mode = "plain"
        self.register_buffer("shift", torch.zeros(2))

    def value(self, batch: Any) -> Tensor:
        x = self.act(self.scaled(helper(self.part(batch[0].to(self.part.layer.weight.dtype)) + self.shift)))
        x = F.relu(x + 1) * ALPHA * CONFIG.beta * CONFIG.table[0] * CONFIG.table[1]["deep"] * Settings.gamma * self.delta
        if hasattr(self, "late"):
            x = x + 3.0
        if self.mode == "other":
            x = x * 5.0
        if self.part.layer.weight.requires_grad:
            x = x - 1.0
        x = x + torch.zeros(1).dtype.itemsize + torch.ones(2, dtype=torch.get_default_dtype()).element_size()
        return (x * self.outside * self.options["a"][0]).double().sum(-1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.value(batch).mean())

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", self.value(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.value(batch), self.mode

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.value(batch).mean().tanh() + self.part.layer.weight.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=self.rate, momentum=0.5)


class OtherReading(Reading):
    """Another class of the same layout."""

    delta = 7.0


class Scaling(pl.Callback):
    """Changes the module at the start of each call, once it is there."""

    def on_predict_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.options["a"][0] = 2.0

    def on_predict_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.options["a"][0] = 1.0


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Calls:
    """Calls of Trainers with one module, and what they returned."""

    def __init__(self, run: Run, model: pl.LightningModule) -> None:
        self.run, self.model = run, model
        run.initialise(model)
        self.loader: Any = run.loader(*regression_data(32))
        self.returned: dict[str, Any] = {}
        self.last: Any = None

    rounds = 2  # what a call has come to know is there for the next

    def look(self, trainer: Any, name: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Call a Trainer, or what makes one for each call, in rounds."""
        found: list[Any] = []
        for again in range(self.rounds):
            with around():
                found += self.call(trainer, again)
        self.returned[f"{len(self.returned)} {name}"] = found

    def call(self, trainer: Any, again: int) -> Iterator[Any]:
        for way in ("predict", "validate", "test")[: 3 - again]:
            self.last = trainer if isinstance(trainer, pl.Trainer) else trainer()
            options = {} if way == "predict" else {"verbose": False}
            yield from getattr(self.last, way)(self.model, self.loader, **options)

    def finish(self) -> None:
        self.run.note("returned", self.returned)
        self.run.finish(self.model, self.last)


class Once(Calls):
    """The same, once after each change."""

    rounds = 1


class Fits(Once):
    """The same with training, and validation in between."""

    def call(self, trainer: Any, again: int) -> Iterator[Any]:
        self.last = trainer()
        self.last.fit(self.model, self.loader, self.loader)
        yield dict(self.last.callback_metrics)


class Copies(Once):
    """Training, validation and prediction of another module each time, as in a cross-validation."""

    def call(self, trainer: Any, again: int) -> Iterator[Any]:
        self.last, model = trainer(), copy.deepcopy(self.model)
        self.last.fit(model, self.loader, self.loader)
        yield dict(self.last.callback_metrics)
        yield from self.last.predict(model, self.loader)


def change(calls: Calls, trainer: Any) -> None:
    """Change a module's world step by step, with calls in between."""
    global ALPHA, helper
    model: Any = calls.model
    calls.look(trainer, "at first")
    ALPHA = 2.0
    calls.look(trainer, "a global")
    CONFIG.beta = 2.0
    calls.look(trainer, "an attribute of a global")
    CONFIG.table[1]["deep"] = 3.0  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue]
    calls.look(trainer, "deep in a list")
    Settings.gamma = 0.5
    calls.look(trainer, "a class's attribute")
    model.scaled.__closure__[0].cell_contents = 4.0  # pyright: ignore
    calls.look(trainer, "a closure")
    model.scaled = closed(4.5)
    calls.look(trainer, "another function of the same code")
    before, helper = helper, lambda x: x + 2.0  # pyright: ignore[reportAssignmentType]
    calls.look(trainer, "a function")
    helper = before
    calls.look(trainer, "the old function")
    model.part.forward = types.MethodType(lambda self, x: self.layer(x) * 2, model.part)
    calls.look(trainer, "a method of an object")
    del model.part.forward
    calls.look(trainer, "the old method")
    Part.kind = 2.0
    calls.look(trainer, "an attribute of a submodule's class")
    Part.kind, model.part.kind = 1.0, 3.0
    calls.look(trainer, "an attribute that hides its class's")
    OtherReading.delta, Reading.delta = 7.0, 0.25
    calls.look(trainer, "the subclass's attribute")
    model.delta = 1.5
    calls.look(trainer, "an attribute of the module that was its class's")
    model.part.power = 2
    calls.look(trainer, "a number in a submodule")
    model.mode = "other"
    calls.look(trainer, "a text")
    model.late = None
    calls.look(trainer, "an attribute that was missing")
    del model.late
    model.options = {"a": [3.0]}
    calls.look(trainer, "another dict")
    model.options["a"].insert(0, 2.5)
    calls.look(trainer, "an entry of a list")
    model.__dict__["mode"] = "plain"
    calls.look(trainer, "past setattr")
    model.act = nn.Tanh()
    calls.look(trainer, "a submodule")
    model.act = nn.Sequential(nn.Tanh(), nn.Hardtanh(-0.1, 0.1))
    calls.look(trainer, "several submodules")
    model.act[1].max_val = 0.2  # pyright: ignore[reportArgumentType]
    calls.look(trainer, "a setting of a submodule")
    model.part.layer.weight.requires_grad_(False)
    calls.look(trainer, "a parameter's requires_grad")
    model.part.dropout.p = 1.0
    calls.look(trainer, "a dropout that is off")
    handle = model.part.register_forward_hook(lambda module, args, output: output + 1)
    calls.look(trainer, "a hook")
    handle.remove()
    calls.look(trainer, "no hook")
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output + 0.5 if isinstance(module, Part) else None
    )
    calls.look(trainer, "a hook of all modules")
    handle.remove()
    model.outside = torch.full((2,), 2.0)
    calls.look(trainer, "a tensor")
    model.outside.mul_(3.0)
    calls.look(trainer, "the values of a tensor")
    with torch.no_grad():
        model.part.layer.weight.mul_(0.5)
        model.shift.add_(2.0)
    calls.look(trainer, "weights and a buffer")
    model.part.layer.bias = nn.Parameter(torch.ones(2))
    calls.look(trainer, "another parameter")
    model.part.layer = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        model.part.layer.weight.fill_(0.1)
    calls.look(trainer, "another layer")
    model.shift = torch.ones(1, 2)
    calls.look(trainer, "a buffer of another shape")
    model.__class__ = OtherReading
    del model.delta
    calls.look(trainer, "another class")
    relu, F.relu = F.relu, F.softplus
    calls.look(trainer, "a function of torch")
    F.relu = relu
    calls.look(trainer, "the old function of torch")
    method, Reading.value = Reading.value, lambda self, batch: self.part(batch[0]).sum(-1)
    calls.look(trainer, "a method of the class")
    Reading.value = method
    calls.look(trainer, "the old method of the class")
    calls.finish()
    ALPHA = CONFIG.beta = Settings.gamma = Reading.delta = Part.kind = 1.0
    CONFIG.table[:] = [1.0, {"deep": 1.0}]


@case
def what_is_changed_between_two_calls(run: Run) -> None:
    trainer = run.trainer()
    change(Calls(run, Reading()), lambda: trainer)


@case
def what_is_changed_between_calls_of_two_trainers(run: Run) -> None:
    change(Once(run, Reading()), run.trainer)


@case
def what_is_changed_between_two_fits(run: Run) -> None:
    change(Fits(run, Reading()), lambda: run.trainer(max_epochs=1))


@case
def what_modules_of_a_class_differ_in(run: Run) -> None:
    change(Copies(run, Reading()), lambda: run.trainer(max_epochs=1))


@case
def five_folds(run: Run) -> None:
    x, y = regression_data(50)
    for fold in range(5):
        model, trainer = Reading(), run.trainer(max_epochs=2)
        run.initialise(model)
        model.outside.add_(fold % 2)
        rest = torch.arange(50) % 5 != fold
        trainer.fit(model, run.loader(x[rest], y[rest]), run.loader(x[~rest], y[~rest]))
        run.note(f"fold {fold}", [dict(trainer.callback_metrics), trainer.predict(model, run.loader(x[~rest], y[~rest]))])
        model.outside.mul_(2)  # a tensor of this fold's own, also where its graph is another's
        run.note(f"fold {fold} later", trainer.validate(model, run.loader(x[~rest], y[~rest]), verbose=False))
    run.finish(model, trainer)


@case
def what_surrounds_two_calls(run: Run) -> None:
    model, trainer = Reading(), run.trainer()
    calls = Calls(run, model)
    calls.look(trainer, "at first")
    calls.look(trainer, "default dtype", default_dtype)
    calls.look(trainer, "as before")
    calls.look(trainer, "deterministic", deterministic)
    calls.look(trainer, "enabled grad", torch.enable_grad)
    model.train()
    calls.look(trainer, "in train mode")
    model.eval()
    calls.look(trainer, "in eval mode")
    scaling = Scaling()
    trainer.callbacks.append(scaling)
    calls.look(trainer, "another callback")
    trainer.callbacks.remove(scaling)
    calls.look(trainer, "no callback")
    x, y = regression_data(32)
    calls.loader = run.loader(x.double(), y)
    calls.look(trainer, "float64 batches")
    calls.loader = [run.loader(x, y), run.loader(x * 2, y)]
    calls.look(trainer, "two loaders")
    calls.loader = run.loader(x[:16], y[:16])
    calls.look(trainer, "another size")
    model.double()
    calls.look(trainer, "weights in float64")
    model.float()
    calls.look(trainer, "weights in float32")
    calls.look(run.trainer(callbacks=[Scaling()]), "another trainer")
    calls.look(trainer, "the first trainer")
    trainer.fit(model, run.loader(x, y))
    calls.look(trainer, "after training")
    calls.finish()


@case
def two_calls_in_bfloat16(run: Run) -> None:
    model, trainer = Reading(), run.trainer()
    calls = Calls(run, model)
    calls.look(trainer, "at first")
    calls.look(trainer, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    calls.look(trainer, "as before")
    x, y = regression_data(32)
    calls.loader = run.loader(x.bfloat16(), y)
    calls.look(trainer, "bfloat16 batches")
    calls.look(run.trainer(precision="bf16-mixed"), "another precision")
    calls.look(trainer, "as before")
    calls.finish()


class Asking(Regression):
    """Steps that ask their Trainer."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        last = batch_idx == self.trainer.num_predict_batches[0] - 1
        return self(batch[0]).sum(-1) + 10 * last, len(self.trainer.predict_dataloaders.dataset)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loader: DataLoader = self.trainer.val_dataloaders
        self.log("val", self.loss(batch) + len(loader) + self.trainer.num_val_batches[0] + len(self.trainer.callbacks))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch) + (self.logger is None) + len(self.trainer.loggers) + self.trainer.log_every_n_steps)


@case
def steps_that_ask_the_trainer_for_what_a_call_gave_it(run: Run) -> None:
    model, trainer = Asking(), run.trainer()
    calls = Calls(run, model)
    calls.look(trainer, "at first")
    x, y = regression_data(64)
    calls.loader = run.loader(x, y)
    calls.look(trainer, "more batches")
    trainer.log_every_n_steps = 7  # pyright: ignore[reportAttributeAccessIssue]
    calls.look(trainer, "a setting")
    trainer.loggers = []
    calls.look(trainer, "no logger")
    trainer.limit_predict_batches = trainer.limit_val_batches = 2
    calls.look(trainer, "limits")
    trainer.callbacks.append(pl.Callback())
    calls.look(trainer, "a callback")
    calls.finish()


class Amount(pl.Callback):
    """Has a number, and is asked by steps for it."""

    def __init__(self, amount: float) -> None:
        self.amount = amount
        self.seen: list[float] = []


HELD = types.SimpleNamespace(callback=None)


class Knowing(Regression):
    """Steps that know their Trainer, a callback, or what a hook has got of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.mine: Any = None

    def on_predict_start(self) -> None:
        self.mine = self.trainer.callbacks[-1]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x = self(batch[0]).sum(-1)
        match self.way:
            case "trainer":
                return x + (self.trainer.max_epochs or 0)
            case "attribute":
                return x + self._trainer.callbacks[-1].amount  # pyright: ignore
            case "getattr":
                return x + getattr(getattr(self, "trainer"), "max_epochs")  # noqa: B009
            case "global":
                return x + HELD.callback.amount
            case "hook":
                return x + self.mine.amount
            case "fills":
                HELD.callback.seen.append(1.0)
                return x
            case _:
                self.trainer.callbacks[-1].seen.append(1.0)  # pyright: ignore[reportAttributeAccessIssue]
                return x + len(self.loggers)


@case
def steps_that_know_their_trainer(run: Run) -> None:
    x, y = regression_data(32)
    loader, model = run.loader(x, y), Knowing("")
    run.initialise(model)
    for way in ("trainer", "attribute", "getattr", "global", "hook", "fills", "appends"):
        model.way = way
        found = []
        callbacks = [Amount(1.0), Amount(1.0), Amount(2.0), Amount(3.0)]
        for number, callback in enumerate(callbacks):
            if number != 3:  # then steps find the one before
                HELD.callback = callback
            trainer = run.trainer(callbacks=[callback], max_epochs=int(callback.amount))
            found += trainer.predict(model, loader)  # pyright: ignore[reportArgumentType]
            callback.amount += 0.5
            found += trainer.predict(model, loader)  # pyright: ignore[reportArgumentType]
        run.note(way, [found, [one.seen for one in callbacks]])
    run.finish(model, trainer)


if __name__ == "__main__":
    main()
