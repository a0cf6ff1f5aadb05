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
