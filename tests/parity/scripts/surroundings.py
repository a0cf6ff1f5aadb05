"""Steps that read what is outside of the module's attributes, and hooks that change it in the middle of a run."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import surroundings_followed  # noqa: F401
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


if __name__ == "__main__":
    main()
