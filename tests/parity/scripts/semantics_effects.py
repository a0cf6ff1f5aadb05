"""What a step's Python reads, formats, prints and draws."""

from __future__ import annotations

import io
import logging
import random
from typing import Any

import numpy as np
import torch.nn.functional as F
from basics import Regression
from recording import Run, case
from semantics_models import fit
from torch import Tensor


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
            loss = super().training_step(batch, batch_idx) * (1 + self.random.random())
            return loss * 2 if batch_idx % 3 == 1 else loss  # a branch that is known before the draw

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


@case
def outputs_and_classes_of_values(run: Run) -> None:
    """Hooks get the loss first, whatever place it has in the step's dict; numbers that come after the step have their class."""

    class Returning(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            root, text = np.sqrt(loss.item()), f"{loss:.2f}"
            names = [type(one).__name__ for one in (loss.item(), loss.item() > 1, root, text, batch_idx)]
            return {"names": names, "text": text, "batch_idx": batch_idx, "loss": loss, "half": loss.detach() / 2}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.record.setdefault("outputs", []).append([list(outputs), outputs["names"], float(outputs["half"])])

    fit(run, Returning())


@case
def numbers_of_numpy_of_counters(run: Run) -> None:
    """What functions of numpy compute of counters and of numbers that hooks change is numpy's, also where it is kept."""

    class Computing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []
            self.drawn = 0.25

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.drawn = 0.3 * (batch_idx + 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            floor, large = np.floor(batch_idx), np.maximum(self.drawn, 2)
            self.kept += [floor, large, floor + 1, 1 / (floor + 1), np.float32(0.5) * batch_idx, floor > 1, -np.square(batch_idx)]
            self.kept += [
                np.clip(self.drawn, 0, 1),
                round(np.sqrt(batch_idx), 2),
                int(floor),
                floor.item(),
                np.add(batch_idx > 0, 1),
            ]
            names.append(type(floor * 2).__name__)
            return super().training_step(batch, batch_idx) * (1 + 0.01 * floor) + 0.01 * large

    names: list[str] = []
    model = Computing()
    fit(run, model)
    run.note("kept", [[type(one).__name__, float(one)] for one in model.kept])
    run.note("names", names)
