"""Uses of gradients and parameters in a step and the hooks around it: by hand, and in automatic optimization."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from basics import Regression
from manual_models import Manual, fit, gradients_of
from recording import Run, case, numbers
from torch import Tensor, nn


@case
def accumulated_by_hand(run: Run) -> None:
    class Accumulating(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            loss = self.loss(batch) / 3
            self.manual_backward(loss)
            if (batch_idx + 1) % 3 == 0 or self.trainer.is_last_batch:
                self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="value")
                optimizer.step()
                optimizer.zero_grad()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append([self.global_step, gradients_of(self)])

    seen: list[Any] = []
    fit(run, Accumulating(), n=112)
    run.note("gradients", seen)


@case
def gradients_read_and_written(run: Run) -> None:
    class Changing(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch), retain_graph=True)
            norm = nn.utils.clip_grad_norm_(self.parameters(), 0.3)
            self.log("norm", norm)
            self.first.weight.grad.mul_(2)
            self.first.bias.grad = torch.ones_like(self.first.bias) * 0.01
            self.layer.bias.grad = None
            loss = self.loss(batch)
            loss.backward(retain_graph=True)
            self.manual_backward(loss)
            largest = torch.stack([p.grad.abs().max() for p in self.parameters()]).max()
            self.log("largest", largest)
            optimizer.step()
            self.log("after", self.loss(batch))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(gradients_of(self))
            if batch_idx == 2:
                self.zero_grad()
            elif batch_idx == 1:
                self.first.weight.grad.fill_(0.5)

    seen: list[Any] = []
    fit(run, Changing())
    run.note("gradients", seen)


@case
def a_backward_pass_in_a_hook(run: Run) -> None:
    """Gradients over all batches, for a diagnosis: the last are there for the next step, where nobody clears them."""

    class Diagnosed(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()

        def on_train_epoch_end(self) -> None:
            for number, batch in enumerate(self.trainer.train_dataloader):
                if number == 2:
                    self.zero_grad()
                self.loss(batch).backward()
                seen.append(gradients_of(self))

    seen: list[Any] = []
    fit(run, Diagnosed())
    run.note("gradients", seen)


@case
def a_backward_pass_in_a_hook_of_automatic_optimization(run: Run) -> None:
    class Diagnosed(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.zero_grad()
            self.loss(batch).square().backward()
            self.loss(batch).backward()
            seen.append(gradients_of(self))

        def on_after_backward(self) -> None:
            if self.global_step > 3:
                self.layer.weight.square().sum().backward()  # added to those of the step
                seen.append(gradients_of(self))

    seen: list[Any] = []
    fit(run, Diagnosed())
    run.note("gradients", seen)


def clamp_gradient(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.1, 0.1)


@case
def hooks_change_gradients(run: Run) -> None:
    class Hooked(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.first.weight.register_hook(lambda grad: grad * (grad.abs() > 0.05))
            self.layer.weight.register_post_accumulate_grad_hook(clamp_gradient)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss * 2).backward(*args, **kwargs)

        def on_before_backward(self, loss: Tensor) -> None:
            self.log("loss", loss)
            flags.append(loss.requires_grad)

        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad *= 0.5

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).sum())

    flags: list[Any] = []
    fit(run, Hooked())
    run.note("requires_grad", all(flags))


# -- automatic optimization ------------------------------------------------------------------------------------------------


@case
def gradients_between_steps(run: Run) -> None:
    """Automatic optimization: gradients seen outside of the hooks in the step, cleared, and not cleared."""

    class Watching(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            there.append(gradients_of(self))
            if batch_idx == 1:  # inside of an accumulation window
                self.layer.weight.grad.mul_(0.5)
            if batch_idx == 3:
                self.zero_grad()

    there: list[Any] = []
    fit(run, Watching(), n=96, accumulate_grad_batches=3)
    run.note("gradients", there)


@case
def gradients_never_cleared(run: Run) -> None:
    class Heavy(Regression):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx == 2:
                optimizer.zero_grad()

        def on_before_zero_grad(self, optimizer: Any) -> None:
            before.append(gradients_of(self))

        def on_before_backward(self, loss: Tensor) -> None:
            before.append([loss.requires_grad, loss.is_leaf, numbers(loss), gradients_of(self)])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            before.append(gradients_of(self))

    before: list[Any] = []
    fit(run, Heavy())
    run.note("before", before)


@case
def teacher_that_follows(run: Run) -> None:
    """Parameters written in a step, as BYOL and MoCo do; a rate that is logged."""

    class Student(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                for mine, its in zip(self.layer.parameters(), self.teacher.parameters(), strict=True):
                    its.data.mul_(0.9).add_(mine.data, alpha=0.1)
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            return self.loss(batch) + F.mse_loss(self(batch[0]), self.teacher(batch[0]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.layer.parameters(), 0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    fit(run, Student())
