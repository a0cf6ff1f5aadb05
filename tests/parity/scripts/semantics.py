"""What a step's Python may do besides computing a loss: side effects, counters, host values, hooks, mode changes, odd results.

A compiled step runs its Python once, so each of these is where it could silently differ from stock.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
from collections import defaultdict, deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from basics import Regression, regression_data
from lightning.pytorch.utilities import CombinedLoader
from recording import Run, case, main, reported_runs
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanAbsoluteError


def fit(run: Run, model: pl.LightningModule, n: int = 64, val: bool = False, **options: Any) -> pl.Trainer:
    """Two epochs of four batches unless told otherwise."""
    trainer = run.trainer(**{"max_epochs": 2, **options})
    loaders = [run.loader(*regression_data(n))] + ([run.loader(*regression_data(32, 1))] if val else [])
    run.fit(model, trainer, *loaders)
    return trainer


class Deep(Regression):
    """Two blocks, the first with dropout (inactive: p = 0) and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.block(x))


# -- side effects ----------------------------------------------------------------------------------------------------------


@case
def tensors_kept_in_containers(run: Run) -> None:
    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []
            self.by_kind: dict[str, Any] = {"losses": [], "nested": {"last": None}}
            self.recent: deque[Tensor] = deque()
            self.latest: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.kept.append({"loss": loss.detach(), "size": len(batch[0])})
            self.by_kind["losses"].append(loss.detach() * 2)
            self.by_kind["nested"]["last"] = loss.detach() + 1
            self.recent.append(loss.detach() - 1)
            self.latest = (loss.detach(), "note")
            return loss

        def on_train_epoch_end(self) -> None:
            run.note(f"kept {self.current_epoch}", [[one["loss"], one["size"]] for one in self.kept])
            run.note(f"kinds {self.current_epoch}", self.by_kind)
            run.note(f"recent {self.current_epoch}", list(self.recent))
            run.note(f"latest {self.current_epoch}", self.latest)
            self.log("mean_of_kept", torch.stack([one["loss"] for one in self.kept]).mean())
            self.kept.clear()
            self.recent.clear()

    fit(run, Keeping(), n=56)


@case
def tensors_kept_in_submodules_and_callbacks(run: Run) -> None:
    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.norm: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x.detach().mean())
            self.norm = x.detach().norm()
            return x * 1.5

    class Collector(pl.Callback):
        def __init__(self) -> None:
            self.values: list[Tensor] = []

    class Probed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.probe = Probe()

        def forward(self, x: Tensor) -> Tensor:
            return self.probe(self.layer(x))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            collector.values.append(loss.detach())
            return loss

    collector = Collector()
    model = Probed()
    fit(run, model, callbacks=[collector])
    run.note("seen", model.probe.seen)
    run.note("norm", model.probe.norm)
    run.note("values", collector.values)


KEPT_BY_THE_SCRIPT: list[Any] = []


@case
def tensors_kept_outside_of_the_module(run: Run) -> None:
    class Keeping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            KEPT_BY_THE_SCRIPT.append(loss.detach())
            kept["last"] = loss.item()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append([len(KEPT_BY_THE_SCRIPT), kept["last"]])

    KEPT_BY_THE_SCRIPT.clear()
    kept: dict[str, float] = {}
    found: list[Any] = []
    fit(run, Keeping())
    run.note("kept", KEPT_BY_THE_SCRIPT)
    run.note("found", found)


@case
def moving_average_in_an_attribute(run: Run) -> None:
    class Averaging(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.average: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.average = loss.detach() if self.average is None else 0.9 * self.average + 0.1 * loss.detach()
            self.log("average", self.average)
            return loss

    model = Averaging()
    fit(run, model)
    run.note("average", model.average)


@case
def moving_average_in_a_buffer(run: Run) -> None:
    class Buffered(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(()))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.average.mul_(0.9).add_(0.1 * loss.detach())
            self.count += 1
            self.log("average", self.average)
            return loss * (1 + 0.01 * self.count)

    fit(run, Buffered())


@case
def counted_in_python(run: Run) -> None:
    class Counting(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.sizes: dict[int, int] = defaultdict(int)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls += 1
            self.sizes[len(batch[0])] += 1
            return super().training_step(batch, batch_idx) * (1 + 0.01 * self.calls)

    model = Counting()
    fit(run, model)
    run.note("calls", model.calls)
    run.note("sizes", model.sizes)


@case
def counters_kept(run: Run) -> None:
    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.indices: list[int] = []
            self.last: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.indices.append(batch_idx)
            self.last = {"epoch": self.current_epoch, "next": self.global_step + 1}
            return {"loss": super().training_step(batch, batch_idx), "index": batch_idx, "half": batch_idx / 2}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append([outputs["index"], outputs["half"], self.last["epoch"], self.last["next"]])

    found: list[Any] = []
    model = Keeping()
    fit(run, model)
    run.note("indices", [int(i) for i in model.indices])
    run.note("found", [[float(x) for x in row] for row in found])


@case
def values_read_in_the_step(run: Run) -> None:
    class Reading(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.values: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.values.append(loss.item())
            return loss

    model = Reading()
    fit(run, model, val=True, accumulate_grad_batches=2, gradient_clip_val=0.5)
    run.note("values", model.values)


@case
def values_formatted_and_computed_with(run: Run) -> None:
    class Reading(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[str, Any] = {"arrays": [], "texts": []}
            self.predictions: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            prediction = self(batch[0])
            loss = F.mse_loss(prediction, batch[1])
            number = loss.item()
            self.table["last"] = {"number": number, "root": round(number, 3), "both": [number + 1, 2 * number**2]}
            self.table["arrays"].append(prediction.detach().mean(0).cpu().numpy())
            self.table["texts"].append(f"loss {loss:.3f} or {number:.2e} at {batch_idx}")
            self.predictions.extend(prediction[:2].detach().argmax(1).tolist())
            self.log("number", number)
            self.log("in percent", number * 100 - 1)
            return loss * (1 + 0.1 * number / (1 + number))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.record.setdefault("last", []).append(self.table["last"]["both"] + [self.table["last"]["root"]])

    model = Reading()
    fit(run, model)
    run.note("arrays", [array.tolist() for array in model.table["arrays"]])
    run.note("texts", model.table["texts"])
    run.note("predictions", model.predictions)


@case
def printed_and_sent_to_loggers(run: Run) -> None:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(self.format(record))

    class Talking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            print("step", self.global_step, batch_idx, loss.item(), loss.detach(), file=printed)
            talk.info("loss %.4f in epoch %d", loss, self.current_epoch)
            if batch_idx % 2 == 0:
                self.logger.log_metrics({"mine": loss, "half": loss.item() / 2}, step=self.global_step)
                print(f"{loss:.4f}", file=printed)
            self.log("loss", loss)
            return loss

    said: list[str] = []
    printed = io.StringIO()
    talk = logging.getLogger("parity.talk")
    talk.setLevel(logging.INFO)
    talk.propagate = False
    talk.addHandler(Handler())
    fit(run, Talking())
    words = [[_as_number(word) for word in line.split()] for line in [*said, *printed.getvalue().splitlines()]]
    run.note("words", words)


def _as_number(word: str) -> Any:
    """A word as the number that it is, so that it is compared as one."""
    try:
        return float(word.removeprefix("tensor(").removesuffix(")"))
    except ValueError:
        return word


@case
def branch_on_a_value(run: Run) -> None:
    class Branching(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 0.5 if loss > 1 else loss

    fit(run, Branching(), val=True)


@case
def random_numbers_of_python(run: Run) -> None:
    class Drawing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.random = random.Random(3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 + self.random.random())

    fit(run, Drawing())


@case
def mixup(run: Run) -> None:
    class Mixing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.generator = np.random.default_rng(7)

        def on_fit_start(self) -> None:
            np.random.seed(3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            share = max(0.1, np.random.beta(0.4, 0.4))
            mixed = share * x + (1 - share) * x.flip(0)
            target = share * y + (1 - share) * y.flip(0)
            loss = F.mse_loss(self(mixed), target)
            if random.random() < 0.5:
                loss = loss + self.generator.normal(0.0, scale=0.1) * self.layer.weight.sum()
                self.log("half", loss)
            self.log("share", share)
            return loss

    fit(run, Mixing(), max_epochs=5)


@case
def global_random_numbers_of_python(run: Run) -> None:
    class Drawing(Regression):
        def on_train_start(self) -> None:
            random.seed(5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 + random.random())

    fit(run, Drawing())


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
            self.log(f"loss_of_epoch_{self.current_epoch}", loss)
            for _ in range(batch_idx % 2):
                loss = loss + self.layer.weight.pow(2).sum() * 0.01
            return loss

    fit(run, Named())


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


# -- hooks -----------------------------------------------------------------------------------------------------------------


def gradients_of(model: pl.LightningModule) -> list[Any]:
    return [None if p.grad is None else p.grad.norm().item() for p in model.parameters()]


@case
def gradients_seen_and_changed_with_accumulation(run: Run) -> None:
    class Watching(Deep):
        def on_before_backward(self, loss: Tensor) -> None:
            seen.append(["backward", loss.item()])

        def on_after_backward(self) -> None:
            seen.append(["after", *gradients_of(self)])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.layer.parameters():
                parameter.grad.mul_(0.5)
            self.log("norm", self.layer.weight.grad.norm())
            seen.append(["step", *gradients_of(self)])

        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append(["zero", self.global_step])

    seen: list[Any] = []
    fit(run, Watching(), n=112, accumulate_grad_batches=2, gradient_clip_val=0.3)
    run.note("seen", seen)


@case
def clipped_by_the_module(run: Run) -> None:
    class Clipping(Regression):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
            given.append([gradient_clip_val, gradient_clip_algorithm])
            self.clip_gradients(optimizer, gradient_clip_val=0.1 * (1 + self.current_epoch), gradient_clip_algorithm="norm")

    given: list[Any] = []
    fit(run, Clipping())
    run.note("given", given)


@case
def optimizer_step_with_warm_up(run: Run) -> None:
    class Warming(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 5)
            optimizer.step(closure=optimizer_closure)

    fit(run, Warming())


@case
def optimizer_step_every_second_batch(run: Run) -> None:
    class Sometimes(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    fit(run, Sometimes())


@case
def own_zero_grad(run: Run) -> None:
    class Zeroing(Regression):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

    fit(run, Zeroing(), accumulate_grad_batches=2)


@case
def own_backward(run: Run) -> None:
    class Scaled(Regression):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss * 0.5).backward()

    fit(run, Scaled())


@case
def parameters_written_in_hooks(run: Run) -> None:
    class Writing(Deep):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.3, 0.3)
            self.layer.weight.data[0] *= 0.9
            self.block[1].running_mean.zero_()

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                state = self.state_dict()
                self.load_state_dict({name: value * 0.5 if value.is_floating_point() else value for name, value in state.items()})

    fit(run, Writing(), val=True)


@case
def model_read_in_hooks(run: Run) -> None:
    class Reading(Deep):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            state = self.state_dict()
            seen.append([float(p.sum()) for p in self.parameters()] + [float(state["layer.bias"].sum())])
            seen.append(self.layer.weight.detach().numpy().sum().item())
            with torch.no_grad():
                self.eval()
                seen.append(self(batch[0]).sum().item())
                self.train()

        def on_validation_epoch_end(self) -> None:
            seen.append(copy.deepcopy(self.layer)(torch.ones(1, 8)).sum().item())

    seen: list[Any] = []
    fit(run, Reading(), val=True)
    run.note("seen", seen)


@case
def snapshots_stay_what_they_were(run: Run) -> None:
    class Snapshots(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            kept.append([self.layer.weight.clone(), self.layer.weight.detach().clone(), copy.deepcopy(self.state_dict())])

    kept: list[Any] = []
    fit(run, Snapshots())
    run.note("kept", kept)


@case
def backward_and_step_in_a_hook(run: Run) -> None:
    class Extra(Regression):
        def on_train_epoch_end(self) -> None:
            loss = self.loss(regression_data(16, 7))
            gradients = torch.autograd.grad(loss, list(self.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(self.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient

    fit(run, Extra())


@case
def batch_changed_in_a_hook(run: Run) -> None:
    class Changing(Regression):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return x * (2 if self.trainer.training else 3), y

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            batch[1].add_(0.1)

    fit(run, Changing(), val=True)


@case
def stopped_inside_an_epoch(run: Run) -> None:
    class Stopping(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 1 and batch_idx == 2 else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == 3 and batch_idx == 1:
                self.trainer.should_stop = True

    fit(run, Stopping(), val=True, max_epochs=6, accumulate_grad_batches=2)


# -- manual optimization and other fallbacks -------------------------------------------------------------------------------


@case
def manual_optimization(run: Run) -> None:
    class Manual(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            schedule = self.lr_schedulers()
            loss = self.loss(batch)
            for optimizer in (first, second):
                optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            second.step()
            if self.trainer.is_last_batch:
                schedule.step()
            self.log("loss", loss, on_epoch=True)

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.layer.parameters(), 0.05)
            second = torch.optim.SGD(self.block.parameters(), 0.01, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.5)]

    fit(run, Manual(), val=True)


@case
def lbfgs(run: Run) -> None:
    class Newton(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=4)

    fit(run, Newton(), val=True)


@case
def sparse_adam(run: Run) -> None:
    class Sparse(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 2, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.mse_loss(self.table(x[:, 0].abs().long() % 10), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SparseAdam(self.parameters(), lr=0.1)

    fit(run, Sparse())


@case
def branch_on_a_value_in_validation(run: Run) -> None:
    class Branching(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.log("val_loss", loss * 2 if loss > 1 else loss)

    fit(run, Branching(), val=True)


@case
def own_optimizer(run: Run) -> None:
    class Signed(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
            return loss

    class Own(Regression):
        def configure_optimizers(self) -> Any:
            return Signed(self.parameters(), 0.01)

    fit(run, Own())


# -- after a run -----------------------------------------------------------------------------------------------------------


@case
def used_after_fit(run: Run) -> None:
    class Predicting(Deep):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    model = Predicting()
    trainer = fit(run, model, val=True)
    x = regression_data(16, 3)[0]
    model.eval()
    with torch.no_grad():
        run.note("output", model(x))
        run.note("copied", copy.deepcopy(model)(x))
    run.note("pickled", pickle.loads(pickle.dumps(model.layer))(x))
    run.note("classes", [type(p).__name__ for p in model.parameters()] + [type(b).__name__ for b in model.buffers()])
    loss = F.mse_loss(model(x), torch.zeros(16, 2))
    loss.backward()
    run.note("gradients", gradients_of(model))
    data = run.loader(*regression_data(32, 2))
    run.note("validated", trainer.validate(model, data, verbose=False))
    run.note("predicted", torch.cat(trainer.predict(model, run.loader(x))))
    second = run.trainer(max_epochs=1)
    second.fit(model, data)
    run.finish(model, second)


@case
def continued_with_the_same_trainer(run: Run) -> None:
    model = Regression()
    trainer = fit(run, model, max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, run.loader(*regression_data()))
    run.finish(model, trainer)


# -- data ------------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, n: int) -> None:
        self.rows = list(zip(*regression_data(n), strict=True))

    def __iter__(self) -> Any:
        return iter(self.rows)


@case
def iterable_dataset(run: Run) -> None:
    train, val = DataLoader(Stream(56), batch_size=run.batch_size), DataLoader(Stream(24), batch_size=run.batch_size)
    run.fit(Regression(), run.trainer(max_epochs=2), train, val)


@case
def combined_loaders(run: Run) -> None:
    class Combined(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            a, b = batch
            self.log("val_both", self.loss(a) + self.loss(b))

    train = CombinedLoader(
        {"a": run.loader(*regression_data(64), shuffle=True), "b": run.loader(*regression_data(32, 1), shuffle=True)}, "min_size"
    )
    val = CombinedLoader([run.loader(*regression_data(32, 2)), run.loader(*regression_data(48, 3))], "max_size_cycle")
    run.fit(Combined(), run.trainer(max_epochs=2), train, val)


@case
def batches_with_texts(run: Run) -> None:
    class Texts(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.mse_loss(self(batch["x"]), batch["y"])
            return {"loss": loss, "ids": batch["id"]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            ids.append([list(outputs["ids"]), list(batch["id"])])

    ids: list[Any] = []
    x, y = regression_data(32)
    rows = [{"x": x[i], "y": y[i], "id": f"row {i}"} for i in range(32)]
    run.fit(Texts(), run.trainer(max_epochs=2), DataLoader(rows, batch_size=run.batch_size))
    run.note("ids", ids)


@case
def texts_that_are_read(run: Run) -> None:
    class Texts(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.firsts: list[Any] = []
            self.weights = {"easy": 1.0, "hard": 3.0}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.mse_loss(self(batch["x"]), batch["y"])
            self.names.extend(batch["name"])
            self.firsts.append(batch["name"][0])
            if batch["task"][0] == "hard":
                loss = loss * 2
            self.log(f"loss_{batch['task'][1]}", loss)
            return loss * self.weights[batch["task"][-1]] * (1 + len(batch["name"]) / 100)

    x, y = regression_data()
    rows = [{"x": x[i], "y": y[i], "name": f"row {i}", "task": "hard" if (i // 16) % 2 else "easy"} for i in range(len(x))]
    model = Texts()
    run.fit(model, run.trainer(max_epochs=2), DataLoader(rows, batch_size=run.batch_size))
    run.note("names", model.names)
    run.note("firsts", model.firsts)


class Texted:
    """A batch of the user's own class."""

    def __init__(self, rows: list[Any]) -> None:
        self.x, self.y = (torch.stack([row[i] for row in rows]) for i in range(2))
        self.names = [row[2] for row in rows]
        self.weight = "0.5" if "4" in self.names[0] else "1.5"
        self.unused = self.names[-1]


@case
def texts_of_batch_objects(run: Run) -> None:
    class Model(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.losses: dict[str, list[Tensor]] = defaultdict(list)
            self.settings: dict[str, Any] = {}
            self.error = MeanAbsoluteError()
            self.error.scale = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch, where = batch
            prediction = self(batch.x)
            loss = F.mse_loss(prediction, batch.y) * float(batch.weight) * float(where["factor"]) * self.error.scale
            self.names.extend(batch.names)
            self.losses["train"].append(loss.detach())
            self.settings["rows"] = len(batch.names)  # the same entry each time
            if "once" not in self.settings:
                self.settings["once"] = "by the step"
            self.error(prediction, batch.y)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.settings["once"] = "by a hook"
            seen.append(dict(self.settings))
            self.error.scale = 0.5 if batch_idx == 1 else 1.0

    def collate(rows: list[Any]) -> Any:
        texts = Texted(rows)
        return texts, {"factor": "2.0" if "3" in texts.names[0] else "1.0", "unused": texts.names[0], "x": texts.x}

    seen: list[Any] = []
    x, y = regression_data()
    rows = [(x[i], y[i], f"row {i}") for i in range(len(x))]
    model = Model()
    run.fit(model, run.trainer(max_epochs=2), DataLoader(rows, batch_size=run.batch_size, collate_fn=collate))  # pyright: ignore[reportArgumentType]
    run.note("kept", [model.names, model.losses["train"], seen, model.error.compute()])


@case
def empty_dataset(run: Run) -> None:
    run.fit(Regression(), run.trainer(max_epochs=2), DataLoader([], batch_size=run.batch_size))


if __name__ == "__main__":
    main()
