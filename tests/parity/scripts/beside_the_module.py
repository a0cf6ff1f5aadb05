"""Tensors and modules that are not in the module's tree: steps write to them in place, hooks replace parts of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from basics import Regression, regression_data
from recording import Run, case, main
from torch import Tensor, nn


class Part(nn.Module):
    """Counts its calls in a buffer."""

    count: Tensor
    dropped: nn.Sequential

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(torch.tensor(value), requires_grad=False)
        self.inner = nn.Linear(1, 1).requires_grad_(False)
        nn.init.constant_(self.inner.weight, value)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.weight + 0.01 * self.count + self.inner(torch.ones(1))


class Holder:
    total: Tensor


class Beside(Regression):
    """Each tensor is held in another place."""

    shared = torch.zeros(2)

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.holder, self.table = [Part(0.5), Part(0.25)], Holder(), {"seen": torch.zeros(1)}
        self.holder.total = self.running = torch.zeros(3)
        self.average = [copy.deepcopy(self.layer).requires_grad_(False)]
        type(self).shared.zero_()
        TENSORS[:] = [torch.ones(2), torch.zeros(2)]
        GLOBAL.zero_()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        global GLOBAL
        loss = self.loss(batch)
        for part in self.parts:
            loss = part(loss).sum()
        with torch.no_grad():
            for mean, param in zip(self.average[0].parameters(), self.layer.parameters(), strict=True):
                mean.mul_(0.9).add_(param, alpha=0.1)
            self.running.mul_(0.9)[0] += loss.detach()
        self.holder.total += 1  # of which `running` is another name
        self.table["seen"] += loss.detach()
        TENSORS[0] *= 1.1
        TENSORS[1].add_(loss.detach())
        GLOBAL += 0.5
        type(self).shared += GLOBAL
        kept = [self.running, self.table["seen"], *TENSORS, self.shared, self.average[0](batch[0])]
        loss = loss + 0.01 * torch.stack([one.mean() for one in kept]).sum()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        TENSORS[1] += 1
        self.log("val_loss", self.parts[0](self.loss(batch)).sum() + TENSORS[1].sum())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.parts[0].count.fill_(0.5)
            TENSORS[0][1] = 2.0
            self.holder.total[2] = 4.0
        self.log_dict({f"count{i}": part.count for i, part in enumerate(self.parts)})
        self.log_dict({"seen": self.table["seen"].sum(), "shared": self.shared.sum(), "global": GLOBAL.sum()})
        self.log_dict({"running": self.running.sum(), "average": self.average[0].weight.sum(), "listed": TENSORS[0].sum()})


TENSORS: list[Tensor] = []
GLOBAL = torch.zeros(2)


@case
def written_in_place(run: Run) -> None:
    """A second fit finds the values that the first has left."""
    model = Beside()
    run.fit(model, run.trainer(max_epochs=2), run.loader(*regression_data(64)), run.loader(*regression_data(32)))
    model.parts[0].count.zero_()
    run.fit(model, run.trainer(max_epochs=1), run.loader(*regression_data(64)), run.loader(*regression_data(32)))


class Reading(Regression):
    """Reads parts, one of them as its tensors, one as a function of the host's, one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [Part(0.5)]
        PARTS[:] = [Part(0.75), Part(0.25)]
        for part in (*self.parts, *PARTS):
            part.dropped = nn.Sequential(nn.Identity())

    def loss(self, batch: Any) -> Tensor:
        one = PARTS[0]
        loss = super().loss(batch) * one.weight + one.inner(torch.ones(1)).sum() + one.count
        return loss + nn.Sequential(*PARTS[1].inner.children(), PARTS[1].inner)(torch.ones(1)).sum() + self.read(self.parts[0])

    @staticmethod
    def read(part: Any) -> Tensor:
        return part.dropped(part.inner(torch.ones(1)) * part.weight + part.count).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for part in (*self.parts, *PARTS):
            if self.global_step == 2:
                part.count = torch.tensor(3.0)
            if self.global_step == 3:
                part.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)
            if self.global_step == 4:
                part.inner = copy.deepcopy(part.inner)
                part.inner.weight.fill_(1.5)
            if self.global_step == 5:
                part.inner.bias = nn.Parameter(torch.ones(1), requires_grad=False)
            if self.global_step == 6:
                part.dropped[0] = nn.Tanh()
            if self.global_step == 7:
                part.dropped.append(nn.Softplus())


PARTS: list[Any] = []


@case
def parts_replaced(run: Run) -> None:
    run.fit(Reading(), run.trainer(max_epochs=2), run.loader(*regression_data(16 * 5)))


@case
def an_entry_made_once_is_replaced(run: Run) -> None:
    """A step makes the entry of a cache, a hook changes it later."""

    class Caching(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.masks: dict[int, Tensor] = {}

        def loss(self, batch: Any) -> Tensor:
            if 2 not in self.masks:
                self.masks[2] = torch.linspace(0.5, 1, 2)
            return (super().loss(batch) * self.masks[2]).sum()

        def on_train_epoch_end(self) -> None:
            self.masks[2] = self.masks[2] * 0.5

    run.fit(Caching(), run.trainer(max_epochs=3), run.loader(*regression_data(16 * 6)))


@case
def a_row_of_a_memory_is_replaced(run: Run) -> None:
    class Remembering(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.zeros(4, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.memory[batch_idx % 4] = loss.detach()
            loss = loss + 0.1 * self.memory.mean()
            self.log("train_loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("memory", self.memory.sum())

    run.fit(Remembering(), run.trainer(max_epochs=2), run.loader(*regression_data(16 * 6)))


if __name__ == "__main__":
    main()
