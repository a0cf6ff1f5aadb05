"""The same effects of a step's Python on every way that runs it: one program, two parts, accumulated, by hand, in evaluation."""

from __future__ import annotations

from typing import Any

import torch
from recording import Run, case, main
from semantics_models import Deep, fit
from torch import Tensor


@case
def flags_set_in_steps(run: Run) -> None:
    class Thawing(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.block[0].requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.current_epoch == 1 and batch_idx == 0:
                self.block[0].requires_grad_(True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.block[1].requires_grad_(False)

    class InTwoParts(Thawing):
        def on_after_backward(self) -> None:
            run.note(f"gradients {self.global_step}", [name for name, p in self.named_parameters() if p.grad is not None])

    class ByHand(Thawing):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return loss

    for kind, options in ((Thawing, {}), (InTwoParts, {}), (Thawing, {"accumulate_grad_batches": 2}), (ByHand, {})):
        model = kind()
        fit(run, model, n=48, val=True, **options)
        run.note(f"{kind.__name__} {options}", {name: [p, p.requires_grad] for name, p in model.named_parameters()})


@case
def retained_gradients(run: Run) -> None:
    class Retaining(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.hidden = self.block(batch[0])
            self.hidden.retain_grad()
            self.kept = {"hidden": self.hidden, "detached": self.hidden.detach()}
            return (self.layer(self.hidden) - batch[1]).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note(f"hidden {self.global_step}", self.hidden.grad)
            run.note(f"kept {self.global_step}", [self.kept["hidden"].grad, self.kept["detached"].grad is None])

    class InTwoParts(Retaining):
        def on_after_backward(self) -> None:
            run.note(f"after backward {self.global_step}", self.hidden.grad)

    class ByHand(Retaining):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return {"loss": loss, "hidden": self.hidden}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            run.note(f"returned {self.global_step}", [outputs["hidden"] is self.hidden, outputs["hidden"].grad])

    class InValidation(Retaining):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            with torch.enable_grad():
                self.input = batch[0].clone().requires_grad_()
                self.layer(self.block(self.input)).square().sum().backward()

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note(f"input {batch_idx}", self.input.grad)

    fit(run, Retaining(), n=32)
    fit(run, InTwoParts(), n=32, accumulate_grad_batches=2)
    fit(run, ByHand(), n=32)
    fit(run, InValidation(), n=32, val=True)


@case
def gradients_of_what_is_no_parameter(run: Run) -> None:
    """Of the batch and of a leaf that the step makes: their hooks are called, and kept ones have the gradient."""

    class OfTheBatch(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.input = batch[0].requires_grad_()
            shift = torch.zeros_like(batch[0], requires_grad=True)
            self.input.register_hook(lambda grad: self.seen.append(grad.norm()))
            shift.register_hook(lambda grad: self.seen.append(grad.sum()))
            return (self.layer(self.block(self.input + 0.5 * shift)) - batch[1]).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.note(f"seen {batch_idx}", [torch.stack(self.seen), self.input.grad])
            self.seen = []

    class InTwoParts(OfTheBatch):
        def on_after_backward(self) -> None:
            run.note(f"after backward {self.global_step}", self.input.grad)

    fit(run, OfTheBatch(), n=32)
    fit(run, InTwoParts(), n=32, accumulate_grad_batches=2)


@case
def hooks_after_the_accumulation_of_gradients(run: Run) -> None:
    class Hooked(Deep):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.layer.weight.register_post_accumulate_grad_hook(self.halve)

        @staticmethod
        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    class InTwoParts(Hooked):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            run.note(f"gradient {self.global_step}", self.layer.weight.grad)

    fit(run, Hooked(), n=32)
    fit(run, InTwoParts(), n=32)


@case
def hooks_on_what_adds_to_gradients(run: Run) -> None:
    """On the nodes of parameters, before and after, and on several parameters at once; registered before fit, and within it."""

    class Hooked(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in (self.layer.weight, self.layer.bias)]
            self.nodes[0].register_prehook(lambda gradients: (gradients[0] * 2,))
            torch.autograd.graph.register_multi_grad_hook([self.layer.weight, self.layer.bias], self.together)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.handle = self.nodes[1].register_hook(self.after)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == 1 and batch_idx == 0:
                self.handle.remove()

        def after(self, inputs: Any, gradients: Any) -> None:
            seen.append(gradients[0].sum())

        def together(self, gradients: Any) -> None:
            seen.append([one.abs().sum() for one in gradients])

    seen: list[Any] = []
    fit(run, Hooked(), n=32)
    run.note("seen", seen)


@case
def in_inference_mode(run: Run) -> None:
    class Inferring(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        @torch.inference_mode()
        def note(self, batch: Any) -> Tensor:
            self.steps += 1
            table = torch.zeros(2)
            table[0] = self(batch[0]).detach().mean()
            return table.view(-1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("noted", self.note(batch).sum())
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("noted in validation", self.note(batch).sum())

    fit(run, Inferring(), val=True)


class Announced(torch.optim.SGD):
    """Writes down when gradients are cleared."""

    calls: list[Any]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls.append([group["lr"] for group in self.param_groups])
        super().zero_grad(set_to_none)


@case
def gradients_cleared_by_the_optimizer_s_own_method(run: Run) -> None:
    class Clearing(Deep):
        def configure_optimizers(self) -> Any:
            optimizer = Announced(self.parameters(), lr=0.1)
            optimizer.calls = self.calls = []
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    for options in ({}, {"accumulate_grad_batches": 2}):
        model = Clearing()
        fit(run, model, n=48, **options)
        run.note(f"calls {options}", model.calls)


@case
def sets_of_counters(run: Run) -> None:
    class Visiting(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.visited: set[Any] = set()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.visited.add((batch_idx, self.global_step))
            self.last = {batch_idx, self.global_step + 10}
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            run.note(f"visited {self.current_epoch}", [sorted(self.visited), sorted(self.last), 11 in self.last])

    fit(run, Visiting(), n=48)


if __name__ == "__main__":
    main()
