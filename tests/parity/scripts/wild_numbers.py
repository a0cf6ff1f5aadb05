"""Numbers that steps make of their results: tensors of several losses, means of lists by NumPy."""

from __future__ import annotations

import random
from collections import deque
from random import choice, shuffle, uniform
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from basics import Classifier, class_data
from numpy.random import permutation
from recording import Run, case
from torch import Tensor


class WeightedByTheirSizes(Classifier):
    """Weighs two losses by a tensor that is made of their values."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        losses = [F.cross_entropy(out, y), out.square().mean()]
        weights = torch.tensor(losses).softmax(0)
        self.log_dict({
            "sum": torch.as_tensor([loss.detach() for loss in losses]).sum(),
            "double": torch.tensor([losses[0].double(), 1]).sum(),
            "mixed": torch.tensor([[losses[1], batch_idx], [y.max(), losses[0].item()]]).sum(),
            "whole": torch.LongTensor([y.max(), 3]).sum(),
            "kept": torch.Tensor([losses[0], losses[1].item()]).std(),
        })  # fmt: skip
        return weights[0] * losses[0] + weights[1] * losses[1] * torch.FloatTensor([x.mean(), losses[1]]).max()


@case
def tensors_made_of_results(run: Run) -> None:
    run.fit(WeightedByTheirSizes(), run.trainer(max_epochs=1), run.loader(*class_data(64)))


class Averaged(Classifier):
    """Logs means by NumPy of what it has computed, in this step and in the last hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[float] = deque(maxlen=100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        self.recent.append(losses.mean().item())
        self.log("recent", np.mean(self.recent))
        self.log("median", float(np.median([loss.item() for loss in losses[:3]])))
        self.log("range", float(np.array([loss.detach().cpu().numpy() for loss in losses[:3]]).std()))
        return losses.mean()


@case
def lists_of_results_given_to_numpy(run: Run) -> None:
    run.fit(Averaged(), run.trainer(max_epochs=1), run.loader(*class_data(320)))


@case
def options_set_in_validation(run: Run) -> None:
    class Setting(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.optimizers().param_groups[0]["lr"] = 0.01 / (batch_idx + 1)
            return self.step(batch, "val")

    run.fit(Setting(), run.trainer(max_epochs=2), run.loader(*class_data(64)), run.loader(*class_data(32)))


ORDER = [0.5, 1.0, 1.5]


class Shuffling(Classifier):
    """Draws by functions that were imported by name, shuffles lists, and takes rows that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [1.0, 2.0, 3.0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        columns, rows = [0, 1, 2, 3], random.sample(range(16), 6)
        shuffle(columns)
        np.random.shuffle(self.order)
        random.shuffle(ORDER)
        x = x[:, torch.from_numpy(permutation(8))] * uniform(0.9, 1.1) + choice([0.1, 0.2])
        x[rows, 0] = 1.0
        out = self.net(x)
        loss = F.cross_entropy(out, y) * self.order[0] + F.cross_entropy(out[rows], y[rows]) * ORDER[0]
        self.log("columns", (x[:, columns] * torch.arange(4)).mean())
        return loss


@case
def lists_shuffled_and_rows_drawn(run: Run) -> None:
    run.fit(Shuffling(), run.trainer(max_epochs=1), run.loader(*class_data(160)))
    run.note("order", ORDER)


def spans(shape: Any, share: float, length: int, there: Tensor | None = None) -> np.ndarray:
    """Spans of each row that are masked, as many as it has places."""
    rows, width = shape
    epsilon = np.random.rand(1).item()
    mask = np.zeros(shape, dtype=bool)
    for row, places in enumerate([width] * rows if there is None else there.detach().sum(-1).tolist()):
        count = max(int(share * places / length + epsilon), 1)
        for start in np.random.choice(np.arange(places - length + 1), count, replace=False):
            mask[row, start : start + length] = True
    return mask


def levels(labels: Tensor, classes: int) -> Tensor:
    """For each label as many ones as it counts."""
    return torch.stack([torch.tensor([1.0] * label.item() + [0.0] * (classes - 1 - label.item())) for label in labels])


def a_few(rows: int) -> tuple[np.ndarray, int]:
    """Two or three rows, and how many they are."""
    chosen = np.random.permutation(rows)[: np.random.randint(2, 4)]
    return chosen, len(chosen)


class Masked(Classifier):
    """Masks spans by functions of numpy that take sizes from what they draw, and from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.filler = torch.nn.Parameter(torch.zeros(1))
        self.share = 0.2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        there = (torch.arange(8) < 4 + y[:, None]).long()
        x = torch.where(torch.from_numpy(spans((len(x), 8), self.share, 2, there)), self.filler, x)
        x[torch.tensor(spans(x.shape, share=0.1, length=1), dtype=torch.bool)] = 0.5
        out = self.net(x)
        loss = F.cross_entropy(out, y) + F.binary_cross_entropy_with_logits(out[:, 1:], levels(y, 3).to(out.dtype))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("masked", F.cross_entropy(self.net(x * torch.from_numpy(~spans((len(x), 8), 0.5, 1))), y))

    def on_train_epoch_end(self) -> None:
        self.share += 0.1


@case
def functions_of_numpy_that_need_values(run: Run) -> None:
    np.random.seed(5)
    run.fit(Masked(), run.trainer(max_epochs=3), run.loader(*class_data(96)), run.loader(*class_data(32)))
    run.note("stream", float(np.random.random()))


class OfAFew(Classifier):
    """A loss of a few rows, as many as a function draws."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        chosen, count = a_few(len(x))
        rows = torch.from_numpy(chosen)
        return F.cross_entropy(self.net(x), y) + F.cross_entropy(self.net(x[rows]), y[rows]) / count


@case
def rows_of_a_number_that_a_function_draws(run: Run) -> None:
    np.random.seed(5)
    run.fit(OfAFew(), run.trainer(max_epochs=3), run.loader(*class_data(64)))
    run.note("stream", float(np.random.random()))


CHECKED = """
def checked(values):
    if not isinstance(values[getrandbits(32) % len(values)], Tensor):
        raise TypeError(values)
    return values
"""


class Checked(Classifier):
    """Calls a function whose list beartype checks: one entry, which is drawn from Python's generator."""

    def __init__(self, checked: Any) -> None:
        super().__init__()
        self.checked = checked

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share = random.random()
        return F.cross_entropy(self.net(sum(self.checked([share * x, (1 - share) * x]))), y)


@case
def lists_that_beartype_checks(run: Run) -> None:
    names: dict[str, Any] = {"getrandbits": random.getrandbits, "Tensor": Tensor}
    exec(compile(CHECKED, "<@beartype(checked) at 0x1>", "exec"), names)
    random.seed(4)
    run.fit(Checked(names["checked"]), run.trainer(max_epochs=2), run.loader(*class_data(64)))
    run.note("stream", random.random())
