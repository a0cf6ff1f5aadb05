"""Predictions that a step matches with targets by SciPy's ``linear_sum_assignment``, and other indices by way of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from recording import Run, case
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
LossOf = Callable[["Matching", Tensor, Tensor], Tensor]


class Matching(pl.LightningModule):
    """Six points for each row, of which ``loss_of`` makes a loss beside the targets of the row."""

    def __init__(self, loss_of: LossOf) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)
        self.loss_of = loss_of
        self.caught = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss_of(self, self.layer(x).unflatten(1, (6, 2)), y)
        self.log("train", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(run: Run, loss_of: LossOf, targets: int = 3) -> Matching:
    generator = torch.Generator().manual_seed(9)
    model = Matching(loss_of)
    data = (torch.randn(48, 4, generator=generator), torch.randn(48, targets, 2, generator=generator))
    run.fit(model, run.trainer(max_epochs=2), run.loader(*data))
    run.note("caught", model.caught)
    return model


def distances(h: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(h, y).square().detach().cpu()


@case
def matched_as_detr_does(run: Run) -> None:
    def loss_of(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        found = [linear_sum_assignment(cost) for cost in distances(h, y)]
        pairs = [(torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in found]
        rows = torch.cat([torch.full_like(source, row) for row, (source, _) in enumerate(pairs)])
        columns = torch.cat([source for source, _ in pairs])
        matched = torch.cat([one[target] for one, (_, target) in zip(y, pairs, strict=True)])
        return (h[rows, columns] - matched).abs().sum() / len(columns)

    fit(run, loss_of)


@case
def more_targets_than_predictions(run: Run) -> None:
    def loss_of(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        cost = distances(h, y).numpy()
        total = h.sum() * 0
        for row in range(2):
            source, target = linear_sum_assignment(cost[row])
            total = total + (h[row, source] - y[row, torch.from_numpy(target)]).square().mean() * len(source)
        return total

    fit(run, loss_of, targets=8)


@case
def matched_with_the_greatest_gain(run: Run) -> None:
    def loss_of(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        gain = (h[0] @ y[0].T).detach().round()  # with many that are equal
        source, target = linear_sum_assignment(gain.numpy(), maximize=True)
        self.log("gain", gain[source, target].sum())
        return (h[0][source] - y[0][target]).square().sum()

    fit(run, loss_of)


@case
def costs_without_an_assignment(run: Run) -> None:
    """SciPy raises, and the step goes on without."""

    def loss_of(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        cost = torch.where(h.detach()[0, :, :1] > 0.6, torch.inf, torch.cdist(h[0], y[0]).detach())
        try:
            source, target = linear_sum_assignment(cost)
        except ValueError:
            self.caught += 1
            return h.square().mean()
        return (h[0][source] - y[0][target]).square().sum()

    fit(run, loss_of, targets=5)


@case
def matched_by_way_of_arrays(run: Run) -> None:
    def entries(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        gain = -distances(h, y).numpy()
        total = h.sum() * 0
        for row in range(3):
            for source, target in zip(*linear_sum_assignment(-gain[row]), strict=True):
                total = total + (h[row, source] - y[row, target]).square().sum()
        return total

    def one_array(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        found = np.array([linear_sum_assignment(cost) for cost in distances(h, y).numpy()])
        pairs = torch.from_numpy(found)
        self.log("first", float(np.mean(found[:, 0])))
        return torch.stack([(h[row][i] - y[row][j]).abs().sum() for row, (i, j) in enumerate(pairs)]).mean()

    def mapped(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        columns = torch.tensor(list(map(linear_sum_assignment, distances(h, y))))[:, 0]
        return h.gather(1, columns[..., None].expand(-1, -1, 2)).square().mean()

    def stacked_and_transposed(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        targets, sources = zip(*[linear_sum_assignment(cost.numpy().T) for cost in distances(h, y)], strict=True)
        chosen = torch.as_tensor(np.stack(sources))
        one, other = targets[0].tolist(), sources[0].copy()
        return h.gather(1, chosen[..., None].expand(-1, -1, 2)).square().mean() + (h[0][other] - y[0][one]).abs().sum()

    for loss_of in (entries, one_array, mapped, stacked_and_transposed):
        fit(run, loss_of)


@case
def indices_by_way_of_numpy(run: Run) -> None:
    def loss_of(self: Matching, h: Tensor, y: Tensor) -> Tensor:
        nearest = distances(h, y).argmin(1).numpy()
        first = torch.from_numpy(nearest)[:, 0]
        kept = nearest.copy()
        kept += 1
        self.log("nearest", float(np.mean(kept)))
        order = h[:, 0, 0].detach().argsort().tolist()
        return (h[torch.arange(len(h)), first] - y[:, 0]).square().mean() + h[order][:4].abs().mean()

    fit(run, loss_of)
