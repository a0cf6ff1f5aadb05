"""Steps that read what is outside of the module's attributes, and hooks that change it in the middle of a run."""

from __future__ import annotations

import array
import dataclasses
import functools
import gc
import io
import itertools
import os
import random
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import surroundings_followed  # noqa: F401
import surroundings_in_c  # noqa: F401
import surroundings_replaced  # noqa: F401
import torch
import torch.nn.functional as F
from basics import Regression, regression_data
from recording import Run, case, main
from torch import Tensor, nn

ALPHA = 1.0
CONFIG = types.SimpleNamespace(alpha=1.0)
TABLE = [1.0, 2.0]
SEEN: list[float] = []
COUNT = 0
BETA = 1.0
DRAWS = np.random.default_rng(0)


class Settings:
    """A class as a namespace."""

    alpha = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    alpha: float = 1.0


class Schedule:
    """An object whose first value is its class's."""

    current = 1.0

    def __call__(self) -> float:
        return self.current


def scaled(loss: Tensor) -> Tensor:
    return loss * ALPHA * TABLE[0]


def by_beta(loss: Tensor) -> Tensor:
    return loss * BETA


def by_default(loss: Tensor, weights: dict[str, float] = {"a": 1.0}) -> Tensor:  # noqa: B006
    return loss * weights["a"]


@functools.lru_cache
def halves() -> Tensor:
    return torch.ones(2) / 2


REGISTRY = {"loss": [by_beta, functools.partial(lambda function, loss: function(loss), by_beta)]}


class Reading(Regression):
    """A hook before each of its steps changes one thing more."""

    factor = 1.0

    def __init__(self, closed: list[Any]) -> None:
        super().__init__()
        self.act: nn.Module = nn.Identity()
        self.array, self.tensor_of = np.ones(2, np.float32), np.ones(2, np.float32)
        self.slotted, self.schedule = Slotted(), Schedule()
        self.deep = {"a": {"b": {"c": {"d": {"e": 1.0}}}}}
        self.change = closed[0]
        self.closed = closed[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = scaled(F.mse_loss(self.act(self.layer(x)), y))
        loss = loss * CONFIG.alpha * Settings.alpha * self.factor * self.closed() * float(self.array[0])
        loss = loss * torch.from_numpy(self.tensor_of)[0] * self.slotted.alpha * self.schedule()
        loss = loss * self.deep["a"]["b"]["c"]["d"]["e"] * getattr(self.trainer, "my_factor", 1.0)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) * (2.0 if self.trainer.sanity_checking else 1.0) * CONFIG.alpha)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change(self, self.trainer.global_step)


def reset() -> None:
    global ALPHA, COUNT
    ALPHA, COUNT, CONFIG.alpha, TABLE[0], Settings.alpha = 1.0, 0, 1.0, 1.0, 1.0
    SEEN.clear()


@case
def what_hooks_change(run: Run) -> None:
    alpha = 1.0

    def change(model: Any, step: int) -> None:
        nonlocal alpha
        global ALPHA
        if step == 1:
            ALPHA = 0.5
        elif step == 2:
            CONFIG.alpha = 0.5
        elif step == 3:
            TABLE[0] = 3.0
        elif step == 4:
            Settings.alpha = 0.5
        elif step == 5:
            type(model).factor = 2.0
        elif step == 6:
            alpha = 0.5
        elif step == 7:
            model.array[0] = model.slotted.alpha = 2.0
        elif step == 8:
            model.tensor_of[0] = 0.5
        elif step == 9:
            model.schedule.current = model.deep["a"]["b"]["c"]["d"]["e"] = 0.5
        elif step == 10:
            model.trainer.my_factor = 3.0
        elif step == 11:
            model.layer.register_forward_hook(lambda module, args, output: output * 0.5)
        elif step == 12:
            model.act = nn.Tanh()

    reset()
    trainer = run.trainer(max_epochs=4)
    run.fit(Reading([change, lambda: alpha]), trainer, run.loader(*regression_data(64)), run.loader(*regression_data(32, 1)))
    Reading.factor = 1.0


@case
def back_and_forth(run: Run) -> None:
    def change(model: Any, step: int) -> None:
        CONFIG.alpha = 1.0 + step % 2

    reset()
    run.fit(Reading([change, lambda: 1.0]), run.trainer(max_epochs=5), run.loader(*regression_data(64)))


@case
def changed_all_the_time(run: Run) -> None:
    """To no effect at first."""

    class Seeing(Regression):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (0.5 if len(SEEN) > 18 else 1.0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            SEEN.append(0.0)

    reset()
    run.fit(Seeing(), run.trainer(max_epochs=6), run.loader(*regression_data(64)))


@case
def counted_outside_of_the_module(run: Run) -> None:
    class Counting(Regression):
        def loss(self, batch: Any) -> Tensor:
            global COUNT
            COUNT += 1
            return super().loss(batch) / COUNT

    reset()
    run.fit(Counting(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))
    run.note("count", COUNT)


@case
def a_module_with_parameters_put_in(run: Run) -> None:
    class Growing(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                added = nn.Linear(2, 2)
                nn.init.eye_(added.weight)
                nn.init.zeros_(added.bias)
                self.layer = nn.Sequential(self.layer, added)  # pyright: ignore[reportAttributeAccessIssue]

    model = Growing()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(model, run.loader(*regression_data(64)))
    run.note("metrics", {name: float(value) for name, value in trainer.callback_metrics.items()})
    run.note("weight", model.get_parameter("layer.1.weight").tolist())


class Hidden(Regression):
    """A model whose reads are found in containers, or change where torch and Python do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.memory, self.long = torch.ones(2), np.ones(2, np.float32), [1.0] * 2000
        self.of_memory, self.power = torch.from_numpy(self.memory), 1.0
        self.acts = nn.ModuleList([nn.Identity()])
        self.acts[0].register_forward_hook(lambda module, args, output: output * 0.5)  # pyright: ignore[reportOperatorIssue]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.acts[0](self.layer(x)), y)
        for function in REGISTRY["loss"]:
            loss = function(loss)
        loss = by_default(loss) * self.table[0] * self.of_memory[0] * self.long[0] * halves().sum() ** self.power
        return loss * float(os.environ.get("PARITY_FACTOR", "1"))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global BETA
        step = self.trainer.global_step
        if step == 1:
            BETA = 0.5
        elif step == 2:
            by_default.__defaults__[0]["a"] = 3.0  # pyright: ignore[reportOptionalSubscript]
        elif step == 3:
            self.table.data[0] = 2.0
        elif step == 4:
            self.memory[0] = 0.5
        elif step == 5:
            self.long[0] = 1.5
        elif step == 6:
            os.environ["PARITY_FACTOR"] = "0.5"

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.acts[0]._forward_hooks.clear()
            self.__dict__["power"] = 2.0
        elif self.current_epoch == 3:
            self.acts._modules["0"] = nn.Tanh()


@case
def what_is_hidden(run: Run) -> None:
    global BETA
    try:
        run.fit(Hidden(), run.trainer(max_epochs=4), run.loader(*regression_data(64)))
    finally:
        BETA = 1.0
        by_default.__defaults__[0]["a"] = 1.0  # pyright: ignore[reportOptionalSubscript]
        os.environ.pop("PARITY_FACTOR", None)


class Above:
    alpha = 1.0


class Below(Above):
    alpha = 2.0


def weighted(run: Run, weight: Callable[[Any, Tensor], Any]) -> Any:
    """Fits a model whose loss is multiplied by ``weight(model, loss)``, which it may not do only once."""

    class Weighted(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.array, self.numbers = torch.zeros(()), np.zeros(2), iter([1.0, 2.0] * 20)

        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            return loss * weight(self, loss.detach())

    model = Weighted()
    run.fit(model, run.trainer(max_epochs=1), run.loader(*regression_data(64)))
    return model


@case
def takes_from_an_iterator(run: Run) -> None:
    weighted(run, lambda model, loss: next(model.numbers))


@case
def writes_to_a_tensor(run: Run) -> None:
    def weight(model: Any, loss: Tensor) -> Tensor:
        model.total += 1
        return model.total

    run.note("total", float(weighted(run, weight).total))


@case
def writes_to_an_array(run: Run) -> None:
    def weight(model: Any, loss: Tensor) -> float:
        model.array[0] += 1
        return float(model.array[0])

    run.note("total", float(weighted(run, weight).array[0]))


@case
def draws_outside_of_the_module(run: Run) -> None:
    DRAWS.bit_generator.state = np.random.default_rng(7).bit_generator.state
    weighted(run, lambda model, loss: DRAWS.random())


@case
def writes_to_a_file(run: Run) -> None:
    def weight(model: Any, loss: Tensor) -> float:
        with open(run.root / "steps.txt", "a") as file:
            file.write("x")
        return 1.0

    weighted(run, weight)
    run.note("length", len((run.root / "steps.txt").read_text()))


@case
def leaves_what_no_record_stands_for(run: Run) -> None:
    """Numbers of a few batches come again, so that few programs serve all."""
    lines, view, held = io.StringIO(), memoryview(array.array("d", [1.0])), 1.0
    below, random_numbers = Above(), random.Random(3)

    def hold(value: float) -> None:
        nonlocal held
        held = value

    def weight(model: Any, loss: Tensor) -> float:
        lines.write("x")
        view[0] = float(lines.tell() % 2)
        hold(0.5 + view[0])
        below.__class__ = Below if view[0] else Above
        return held + below.alpha + (random_numbers.random() > 0.5)

    weighted(run, weight)
    run.note("left", [lines.getvalue(), view[0], held, type(below).__name__, random_numbers.random()])


@case
def leaves_memory_and_an_order(run: Run) -> None:
    """What the step writes past torch, and the order of entries, are there for the next batch and not for this one."""
    shared, ordered = torch.from_numpy(np.ones(1, "f4")), OrderedDict(a=0.5, b=1.5)

    def weight(model: Any, loss: Tensor) -> Tensor:
        found = shared.sum() + next(iter(list(ordered.values())))
        shared.numpy()[0] = 1.0 + model.trainer.global_step % 2
        ordered.move_to_end(min(ordered, key=lambda name: ordered[name]), last=model.trainer.global_step % 2 == 0)
        return found

    weighted(run, weight)
    run.note("left", [shared.tolist(), list(ordered)])


@case
def fills_an_ordered_dict(run: Run) -> None:
    made = OrderedDict(a=1.0)

    def weight(model: Any, loss: Tensor) -> float:
        made["last"] = float(model.trainer.global_step)
        return 1.0 + len(made)

    weighted(run, weight)
    run.note("left", list(made.items()))


def halved() -> Iterator[float]:
    """Numbers that go on from what is sent."""
    value = 4.0
    while True:
        sent = yield value
        value = value / 2 if sent is None else sent


@case
def takes_from_generators_and_draws(run: Run) -> None:
    """No number comes again: they are inputs of one program."""
    numbers, draws, counts = halved(), random.Random(3), itertools.count(1)

    def weight(model: Any, loss: Tensor) -> Tensor:
        found = loss * next(numbers) + draws.random() / next(counts)
        return found + (numbers.send(3.0) if next(model.numbers) > 1.5 else 0.0)

    weighted(run, weight)
    run.note("left", [next(numbers), draws.random(), next(counts)])


@case
def drops_what_a_weak_reference_shows(run: Run) -> None:
    """It is gone at once: nothing is left of a run of the step's Python that came to nothing."""

    class Dropping(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.turns, self.kept, self.seen = itertools.count(1), [Settings()], []
            self.weak = weakref.WeakSet(self.kept)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) / next(self.turns)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.kept.clear()
            self.seen.append(len(self.weak))

    model = Dropping()
    gc.disable()
    try:
        run.fit(model, run.trainer(max_epochs=1), run.loader(*regression_data(64)))
    finally:
        gc.enable()
    run.note("seen", model.seen)


@case
def takes_from_a_generator_in_vain(run: Run) -> None:
    """A step that becomes eager after its Python has taken something: the eager step gets just that."""
    numbers, counts = halved(), itertools.count(1)

    def weight(model: Any, loss: Tensor) -> float:
        found = next(numbers) / next(counts)
        return found + (int(loss) % 2 if model.trainer.global_step > 2 else 0)

    weighted(run, weight)
    run.note("left", [next(numbers), next(counts)])


@case
def reads_the_metrics(run: Run) -> None:
    weighted(run, lambda model, loss: 1 + model.trainer.callback_metrics.get("train_loss", torch.zeros(())))


@case
def reads_the_gradients_of_the_step_before(run: Run) -> None:
    def weight(model: Any, loss: Tensor) -> Tensor | float:
        return 1.0 if model.layer.weight.grad is None else 1 + model.layer.weight.grad.abs().mean()

    weighted(run, weight)


@case
def assigns_data(run: Run) -> None:
    def weight(model: Any, loss: Tensor) -> float:
        model.layer.weight.data = model.layer.weight.data.clamp(-0.1, 0.1)
        return 1.0

    weighted(run, weight)


class Shown(Regression):
    """Counts in a tensor whose memory an array of NumPy's shows."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [torch.zeros(2)]
        self.shown = self.counts[0].numpy()

    def loss(self, batch: Any) -> Tensor:
        self.counts[0].add_(1)
        return super().loss(batch) + self.counts[0].sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("shown", float(self.shown.sum()))


@case
def shown_by_an_array(run: Run) -> None:
    run.fit(Shown(), run.trainer(max_epochs=1), run.loader(*regression_data(32)))


if __name__ == "__main__":
    main()
