"""Counters and attributes that a step reads and changes, and what it may return."""

from __future__ import annotations

import collections
import copy
import functools
import math
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from basics import Regression
from recording import Run, case, reported_runs
from semantics_models import Deep, fit
from torch import Tensor

# -- counters and attributes -----------------------------------------------------------------------------------------------


@case
def counters_in_arithmetic_and_branches(run: Run) -> None:
    class Counted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if batch_idx % 3 == 0:
                loss = loss * 2
                self.log("third", loss)
            warm = min(1.0, (self.global_step + 1) / 10)
            loss = loss * warm + 0.1 * self.current_epoch * loss + torch.tensor(float(batch_idx)) * 0
            ramp = math.exp(-(self.global_step + 1) / 10) + np.cos(batch_idx / 5)
            parts = torch.tensor([batch_idx, 1.5]), loss.new_tensor([copy.copy(batch_idx) & 1, divmod(batch_idx, 3)[1]])
            loss = loss * torch.tensor(ramp) + 0.01 * torch.stack(parts).sum() * self.layer.bias.sum()
            self.log("warm", warm)
            self.log("step", self.global_step)
            self.log("epoch_in_step", self.trainer.current_epoch + 0.5)
            self.log("loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch) * (batch_idx + 1) + self.current_epoch)

    fit(run, Counted(), n=120, val=True, max_epochs=3)


@case
def counters_in_texts_and_indices(run: Run) -> None:
    class Named(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [1.0, 0.5, 0.25, 0.125]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch) * self.scales[batch_idx % 4] + 0.1 * self(batch[0])[batch_idx - 2].sum()
            loss = loss + 0.1 * self.layer.weight[:, batch_idx % 4].sum()
            loop = self.trainer.fit_loop
            if loop.epoch_progress.current.ready == 2:
                loss = loss * 1.5
            loss = loss + 0.001 * loop.epoch_loop.batch_progress.total.ready + 0.001 * loop.epoch_loop.total_batch_idx
            loss = loss + 0.01 * loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.current.completed
            size = batch_idx % 4 + 1
            loss = loss + 0.1 * self.layer.bias.expand(size, -1).sum() + batch[0].new_ones(size, 2).mean()
            loss = loss + 0.1 * (batch[0].roll(batch_idx % 4, 0) * self(batch[0]).mean()).mean()
            self.log(f"loss_of_epoch_{self.current_epoch}", loss)
            self.log(f"{type(loss).__name__}_{type(batch[0]).__name__}", loss)
            for _ in range(batch_idx % 2):
                loss = loss + self.layer.weight.pow(2).sum() * 0.01
            return loss

    fit(run, Named())


SCHEDULE = (1.0, 0.5, 0.25, 0.125, 0.1, 0.05)
MILESTONES = {3, 7, 8}


@case
def schedules_in_lists(run: Run) -> None:
    class Scheduled(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.scales = [1.0, 0.9, 0.8, 0.7]
            self.widths = [3, 2, 1]
            self.rates = {0: 1.0, 2: 0.5}
            self.betas = np.linspace(0.5, 1.0, 6)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch) * SCHEDULE[self.current_epoch] * self.scales[-1 - batch_idx % 4]
            loss = loss * self.widths[min(self.current_epoch, 2)] + 0.01 * self.scales[random.randint(0, 3)]
            if self.global_step in MILESTONES or self.current_epoch in self.rates:
                loss = loss * 2
            loss = loss * self.rates.get(self.current_epoch, 0.7) * self.betas[self.current_epoch]
            self.log("scale", self.scales[batch_idx % 4])
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", [3.0, 2.0, 1.0, 0.5, 0.25, 0.1][self.current_epoch])

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 3:
                self.scales[2] = 0.1
                self.rates[3] = 0.3

    random.seed(3)
    fit(run, Scheduled(), val=True, max_epochs=5)
    run.note("few programs", [entry["captures"] <= 9 for entry in reported_runs()[-1:]] or [True])


@case
def a_schedule_that_ends_too_early(run: Run) -> None:
    class Short(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * [1.0, 0.5][self.current_epoch]

    fit(run, Short(), max_epochs=4)


@case
def annealed_every_step(run: Run) -> None:
    class Annealed(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.beta, self.temperature, self.steps = 0.0, 2.0, 0
            self.history: list[float] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.beta = min(1.0, 0.05 * self.global_step)
            self.temperature *= 0.9
            self.block[0].scale = 1 + self.global_step

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch) / self.temperature + self.beta * self.layer.weight.pow(2).sum() * self.block[0].scale
            if self.beta > 0.3:
                loss = loss * 2
            self.log("beta", self.beta)
            self.history.append(self.temperature)
            self.steps += 1
            return loss * (1 + 0.01 * self.steps)

    model = Annealed()
    model.block[0].scale = 1
    fit(run, model, max_epochs=4)
    run.note("history", model.history)
    run.note("steps", model.steps)
    run.note("variants", [entry["variants"] <= 6 for entry in reported_runs()[-1:]] or [True])


@case
def annealed_by_the_step(run: Run) -> None:
    class Annealing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.stage = 0.0, "none"
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.weight = min(1.0, self.global_step / 4)  # reaches its last value, and is assigned again and again
            self.stage = "training"  # what it is at the second capture, but not when a hook has changed it
            self.seen.append(self.weight)
            return super().training_step(batch, batch_idx) * (1 + self.weight)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(self.stage)
            if batch_idx > 1:
                self.stage = "between"

    model = Annealing()
    fit(run, model, max_epochs=4)
    run.note("seen", model.seen)
    run.note("compiled", [entry["executor"] == "compiled" for entry in reported_runs()[-1:]] or [True])


@case
def numbers_for_lists_of_tensors(run: Run) -> None:
    """The weight of an average is another in each step: of counters, of a buffer, of the step itself."""

    class Averaged(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(2, 8))
            self.register_buffer("bias", torch.ones(2))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            averages, weights = [self.weight, self.bias], [one.detach() for one in self.layer.parameters()]
            decay, now = min(0.9, (1 + self.global_step) / (10 + self.global_step)), int(self.steps) / 20
            torch._foreach_mul_(averages, decay)
            torch._foreach_add_(averages, weights, alpha=1 - decay)
            torch._foreach_lerp_(averages, weights, now)
            torch._foreach_addcmul_(averages, weights, weights, [0.1 * now, 0.2 * now])
            torch._foreach_addcdiv_(averages, weights, torch._foreach_maximum(weights, 1 + now), 0.1 * batch_idx)
            torch._foreach_add_(averages, loss.item() * 0.01)
            self.bias.add_(weights[1], alpha=0.1 * now).addcmul_(weights[1], weights[1], value=0.01 * batch_idx)
            self.steps += 1
            return loss + torch.nn.functional.linear(batch[0], self.weight, self.bias).square().mean()

    fit(run, Averaged())
    run.note("programs", [entry["variants"] for entry in reported_runs()[-1:]] or [1])


@case
def attributes_changed_by_hooks(run: Run) -> None:
    class Settings:
        def __init__(self) -> None:
            self.gamma = 1.0

    class Changing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.beta = 0.0
            self.options = {"alpha": 1.0, "deep": {"delta": 1.0}}
            self.rates = [1.0]
            self.settings = Settings()
            self.save_hyperparameters({"scale": 1.0})

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx) * (1 + self.beta) * self.rates[0] * self.hparams["scale"]
            return loss * self.options["alpha"] * self.options["deep"]["delta"] * self.settings.gamma

        def on_train_epoch_start(self) -> None:
            changes = [
                lambda: setattr(self, "beta", 0.5),
                lambda: self.options.update(alpha=2.0),
                lambda: self.options["deep"].update(delta=0.5),
                lambda: self.rates.__setitem__(0, 0.7),
                lambda: setattr(self.settings, "gamma", 0.3),
                lambda: self.hparams.update(scale=3.0),
            ]
            if self.current_epoch:
                changes[self.current_epoch - 1]()

    fit(run, Changing(), n=32, max_epochs=7)


@case
def attribute_of_a_callback_read(run: Run) -> None:
    class Weight(pl.Callback):
        value = 1.0

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.value = 1.0 + trainer.current_epoch

    class Weighted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * weight.value

    weight = Weight()
    fit(run, Weighted(), n=32, callbacks=[weight], max_epochs=3)


@case
def tensor_attribute_changed(run: Run) -> None:
    class Weighted(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.tensor([1.0, 2.0])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return ((self(x) - y) ** 2 * self.weights).mean()

        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 0:
                self.weights.mul_(0.5)
            else:
                self.weights = torch.tensor([3.0, 1.0])

    fit(run, Weighted(), n=32, max_epochs=4)


@case
def frozen_in_mid_run(run: Run) -> None:
    class Freezing(Deep):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.block.requires_grad_(False)
                self.block.eval()
            if self.current_epoch == 2:
                self.block.requires_grad_(True)
                self.block.train()

    fit(run, Freezing(), max_epochs=4, val=True)


@case
def frozen_from_the_start(run: Run) -> None:
    class Frozen(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.block.requires_grad_(False)
            self.block.eval()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            modes.append([self.training, self.block.training, self.block[1].training])

    modes: list[Any] = []
    fit(run, Frozen(), val=True)
    run.note("modes", modes)


# -- results ---------------------------------------------------------------------------------------------------------------


@case
def result_with_extras(run: Run) -> None:
    class Extra(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            prediction = self(x)
            loss = F.mse_loss(prediction, y)
            return {"loss": loss, "prediction": prediction, "name": "extra", "nested": [loss * 2, {"n": 3}]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rows.append([sorted(outputs), outputs["prediction"].sum(), outputs["nested"], outputs["name"]])

    rows: list[Any] = []
    fit(run, Extra(), accumulate_grad_batches=2)
    run.note("rows", rows)


@case
def a_cached_property_is_dropped_in_a_hook(run: Run) -> None:
    """A number that is an input, and is deleted without an assignment, is computed by the step once more."""

    class Cached(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.rate = 1.0

        @functools.cached_property
        def factor(self) -> float:
            return self.rate * 1.5

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.factor

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.rate += 0.5
                self.__dict__.pop("factor", None)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append([outputs["loss"].item(), self.factor])

    seen: list[Any] = []
    fit(run, Cached(), n=96, max_epochs=3)
    run.note("seen", seen)


@case
def none_now_and_then(run: Run) -> None:
    class Skipping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            kinds.append([batch_idx, outputs is None, self.global_step])

    kinds: list[Any] = []
    fit(run, Skipping(), n=96)
    run.note("kinds", kinds)


@case
def none_in_an_accumulation_window(run: Run) -> None:
    class Skipping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    fit(run, Skipping(), n=96, accumulate_grad_batches=2)


class Decay:
    """A schedule in an object of its own."""

    def __init__(self) -> None:
        self.steps = 0
        self.factor = 1.0

    def step(self) -> float:
        self.steps += 1
        self.factor *= 0.9
        return self.factor


SEEN_BY_ALL = {"steps": 0}


@case
def numbers_counted_in_dicts_lists_and_objects(run: Run) -> None:
    class Counted(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.seen = {"steps": 0, "inner": {"weight": 1.0}}
            self.by_kind: dict[Any, int] = collections.defaultdict(int)
            self.places = [0, 0, 5.5]
            self.decay = Decay()

        def on_train_epoch_start(self) -> None:
            self.by_kind.clear()
            self.seen["steps"] += 10

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen["steps"] += 1
            self.seen["inner"]["weight"] *= 0.5
            self.by_kind["rows"] += len(batch[0])
            self.places[batch_idx % 2] += 1
            SEEN_BY_ALL["steps"] += 1
            loss = self.loss(batch) * self.decay.step() * min(1.0, self.seen["steps"] / 20) + self.seen["inner"]["weight"]
            if self.seen["steps"] % 3 == 0:
                loss = loss * 2
            self.log("steps", float(self.seen["steps"]))
            self.log("weight", self.seen["inner"]["weight"])
            return loss / self.by_kind["rows"] + 0.01 * self.places[0] * loss / SEEN_BY_ALL["steps"]

    module = Counted()
    fit(run, module, n=96, max_epochs=2)
    run.note("counted", [module.seen, dict(module.by_kind), module.places, vars(module.decay), SEEN_BY_ALL])
    run.note("types", [type(one).__name__ for one in (module.seen["steps"], *module.places, module.decay.factor)])


@case
def a_number_that_becomes_a_fraction(run: Run) -> None:
    class Halving(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.counts: dict[str, float] = {"n": 0}
            self.texts: list[str] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.counts["n"] += 1 if self.counts["n"] < 3 else 0.5
            self.texts.append(f"{self.counts['n']}")
            return self.loss(batch) * self.counts["n"]

    module = Halving()
    fit(run, module, n=96)
    run.note("counts", [module.counts, module.texts])
