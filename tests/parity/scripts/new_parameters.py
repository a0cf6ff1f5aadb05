"""Parameters that come in, or are replaced, during fit, and optimizers that are told of them."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from basics import Regression
from recording import Run, case, main
from semantics_models import Deep, fit
from torch import Tensor, nn


class Growing(Regression):
    """Gets another layer after its third optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.more:
            x = x + layer(x).tanh()
        return self.layer(x)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            torch.manual_seed(9)
            self.more.append(nn.Linear(8, 8))
            self.trainer.optimizers[0].add_param_group({"params": self.more[-1].parameters(), "lr": 0.05, "initial_lr": 0.05})


@case
def a_layer_comes_in(run: Run) -> None:
    model = Growing()
    fit(run, model, val=True)
    run.note("state", {str(i): one["exp_avg"] for i, one in model.trainer.optimizers[0].state_dict()["state"].items()})


@case
def a_layer_comes_in_between_accumulated_batches(run: Run) -> None:
    class Seeing(Growing):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            run.note(f"gradients {self.global_step}", {name: p.grad for name, p in self.named_parameters()})

    for kind in (Growing, Seeing):
        fit(run, kind(), n=96, accumulate_grad_batches=2, gradient_clip_val=0.1)


@case
def a_layer_is_replaced_by_hand(run: Run) -> None:
    class Replaced(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                torch.manual_seed(9)
                (group,) = self.optimizers().param_groups
                kept = [p for p in group["params"] if all(p is not old for old in self.layer.parameters())]
                self.layer = nn.Linear(8, 2)
                group["params"] = [*kept, *self.layer.parameters()]

    fit(run, Replaced())


@case
def other_optimizers(run: Run) -> None:
    class Switching(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.strategy.optimizers = [torch.optim.RMSprop(self.parameters(), lr=0.01)]

    fit(run, Switching())


@case
def optimizers_are_made_once_more(run: Run) -> None:
    """As recipes for staged training do it: a new head, and ``configure_optimizers`` again with a new scheduler."""

    class Staged(Deep):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def on_train_epoch_end(self) -> None:
            self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
            if self.current_epoch == 0:
                self.layer = nn.Linear(8, 2)
                nn.init.constant_(self.layer.weight, 0.1)
                nn.init.zeros_(self.layer.bias)
                self.trainer.strategy.setup_optimizers(self.trainer)

    fit(run, Staged(), max_epochs=3)


@case
def weights_are_untied(run: Run) -> None:
    class Tied(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.second(self.first(batch[0]).tanh()).sum(1) - batch[1].sum(1)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.second.weight = nn.Parameter(self.second.weight.detach().clone())
                self.trainer.optimizers[0].add_param_group({"params": [self.second.weight]})

    fit(run, Tied())


@case
def a_teacher_is_copied_when_training_starts(run: Run) -> None:
    class Student(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.teacher: Any = None

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.teacher = copy.deepcopy(self.block).requires_grad_(False)

        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            return loss if self.teacher is None else loss + (self.teacher(batch[0]) - self.block(batch[0])).square().mean()

    fit(run, Student(), val=True)


if __name__ == "__main__":
    main()
