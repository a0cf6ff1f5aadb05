"""Values for which a step's Python asks while only the running step knows them: of losses, gradients and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from recording import RecordingLogger, Run, case, numbers
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]
LossOf = Callable[["Branching", Tensor, Tensor], Any]


def pairs(count: int = 96, spoiled: bool = False) -> Data:
    """Inputs and targets; with a target that is not finite in the second batch."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(count, 4, generator=generator), torch.randn(count, generator=generator)
    if spoiled:
        y[20] = math.inf
    return x, y


class Branching(pl.LightningModule):
    """A linear model; ``loss_of`` makes a loss of its predictions and targets, and may look at it."""

    def __init__(self, loss_of: LossOf, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.best = math.inf
        self.hits = 0
        self.seen: list[Any] = []
        self.register_buffer("mean", torch.zeros(()))
        self.loss_of = loss_of
        self.optimizer = optimizer

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        x, y = batch
        loss = self.loss_of(self, self.layer(x).squeeze(-1), y)
        if loss is not None:
            self.log("train", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), 0.1)


def fit(run: Run, loss_of: LossOf, spoiled: bool = False, **options: Any) -> Branching:
    model = Branching(loss_of)
    run.fit(model, run.trainer(max_epochs=3, **options), run.loader(*pairs(spoiled=spoiled)))
    run.note("kept", [model.best, model.hits, [numbers(one) for one in model.seen]])
    return model


@case
def branches_on_the_loss(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        if torch.isnan(loss):
            raise ValueError("not a number")
        self.mean += loss.detach()
        if loss > 1.0:
            self.seen.append(loss.detach())
            self.log("large", loss)
            loss = loss * 0.5
        return loss

    fit(run, loss_of)


@case
def the_best_loss_is_kept(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        if loss.item() < self.best:
            self.best = loss.item()
            self.hits += 1
        return loss * (2 if float(loss) > 0.9 else 1)

    fit(run, loss_of)


@case
def smaller_of_two_numbers(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        self.best = min(self.best, loss.item())
        self.log("best", self.best)
        return loss

    fit(run, loss_of)


@case
def batches_are_skipped(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor | None:
        loss = F.mse_loss(h, y)
        if not torch.isfinite(loss):
            self.hits += 1
            return None
        return loss

    fit(run, loss_of, spoiled=True)


@case
def batches_are_skipped_in_accumulation(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor | None:
        loss = F.mse_loss(h, y)
        return None if math.isinf(loss.item()) or loss > 2.5 else loss

    fit(run, loss_of, spoiled=True, accumulate_grad_batches=2, gradient_clip_val=0.5)


@case
def loops_until_it_is_small(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        scale, error = 1.0, F.mse_loss(h, y)
        while error > 0.5 and scale > 0.2:
            scale = scale * 0.5
            error = F.mse_loss(h * scale, y * scale)
        return error

    fit(run, loss_of)


@case
def looks_with_functions(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        assert loss.isfinite(), "finite"
        assert torch.isfinite(h).all().item() and not math.isnan(loss.item())
        if torch.allclose(h, y, atol=3.0) or torch.equal(h, y):
            loss = loss * 1.5
        if int((h > 0).sum() > 8) or (h > 2).any():
            loss = loss + 0.1 * h.mean()
        return loss

    fit(run, loss_of)


@case
def compares_in_double_precision(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss, tenth = F.mse_loss(h, y), ((h * 0).sum() + 0.1).item()
        self.hits += 1 if tenth > 0.1 else 100  # the nearest float32 is larger
        return loss * 2 if tenth * 3 / 2 <= 0.15 else loss

    fit(run, loss_of)


@case
def a_step_raises(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        self.seen.append(self.trainer.global_step)
        if torch.isinf(loss):
            raise ValueError(f"the loss is {loss.item()}")
        return loss

    model = Branching(loss_of)
    trainer = run.trainer(max_epochs=2)
    try:
        trainer.fit(model, run.loader(*pairs(spoiled=True)))
    except ValueError as error:
        run.note("raised", str(error))
    run.note("kept", [trainer.global_step, model.seen, numbers(model.layer.weight)])


@case
def asserted_by_torch_and_distributions(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        torch._assert_async((y.abs() < 100).all(), "targets are small")
        loss = F.mse_loss(h, y)
        torch._assert_async(loss < 1e4, "the loss is small")
        torch._assert_async(loss.isfinite())
        standard = torch.distributions.Normal(torch.zeros_like(h), 1.0)
        standard._validate_sample(h)
        return loss - 0.1 * standard.log_prob(h).mean()

    fit(run, loss_of)


@case
def an_assertion_of_torch_fails(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        torch._assert_async(loss < 1e4, "the loss is small")
        return loss

    model = Branching(loss_of)
    trainer = run.trainer(max_epochs=2)
    try:
        trainer.fit(model, run.loader(*pairs(spoiled=True)))
    except RuntimeError as error:
        run.note("raised", str(error))
    run.note("kept", [trainer.global_step, numbers(model.layer.weight)])


@case
def guesses_that_end_in_errors(run: Run) -> None:
    """What is assumed first makes a loss of constants, which has no gradient, and then an assertion fails."""

    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        kept = h[y > h.detach().mean()]
        losses = (kept - 1).square().sum()
        if not torch.isfinite(losses):
            losses = torch.tensor(1e9)
        loss = losses / len(y) + F.mse_loss(h, y).nan_to_num() * float(bool(losses < 1e8))
        assert not torch.isnan(loss)
        assert torch.isfinite(loss), "not finite"
        return loss

    fit(run, loss_of)


@case
def fractions_as_whole_numbers(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        size = [4, 8, 16][min(int(h.detach().abs().mean().item() * 2.5), 2)]
        self.seen.append(size)
        return F.mse_loss(h[:size], y[:size]) + 0.1 * int(y.max().item()) * h.mean()

    fit(run, loss_of)


@case
def numbers_at_a_threshold(run: Run) -> None:
    """Tenths in single precision, which Python compares, cuts and divides in double: 10 times 0.7 is no 7."""
    tenths = [0.1, 0.3, 0.6, 0.7, 0.9, 0.2, 0.7, 0.29]

    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        value = ((h.detach() * 0).sum() + tenths[self.trainer.global_step % 8]).item()
        reached = value * 10 >= 7
        self.hits += reached
        self.log_dict({"reached": reached, "as_fraction": float(reached), "points": 2.5 * reached}, on_epoch=True, on_step=True)
        self.log_dict({"whole": float(int(value * 10)), "steps": value // 0.1, "rest": value % 0.1, "exactly": value == 0.7})
        if value >= 0.7:
            self.best = value
        return F.mse_loss(h, y) * (1 + float(reached)) + torch.tensor(2.0) * reached

    fit(run, loss_of)


@case
def whole_numbers_of_more_than_32_bits(run: Run) -> None:
    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        count = (h.detach() * 0 < 1).sum().item()
        work = count * 6 * 10**9
        self.hits += work
        self.log_dict({"work": float(work), "power": float(count**12), "share": work / (work + 10**10), "left": -work + 1.5})
        self.log_dict(
            {"parts": work // 10**9, "rest": float(work % 7), "over": float(work - 95999999990), "size": float(abs(-work))}
        )
        if work > 4 * 10**11:
            self.best = count
        return F.mse_loss(h, y) * (1 + work / 10**12) + h.mean() * 1e-12 * work + h.square().mean() * (work > 5 * 10**11)

    fit(run, loss_of)


@case
def losses_of_one_row(run: Run) -> None:
    shapes = []

    class Shown(Branching):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            shapes.append([list(outputs["loss"].shape), float(outputs["loss"])])

    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(h, y).reshape(1)

    run.fit(model := Shown(loss_of), run.trainer(max_epochs=2, accumulate_grad_batches=2), run.loader(*pairs()))
    run.note("shapes", shapes)
    assert model


@case
def arrays_and_numbers_of_numpy_are_kept(run: Run) -> None:
    """An attribute that the step replaces by them, whose value of the step before it looks at."""

    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        count = np.maximum((y > 0.5).sum().item(), 2)
        self.hits, before = count, self.hits
        array = y.detach().numpy()
        self.seen += [y.sum() * array[:2], y.sum() / array[:2], y.sum() - array[:2], y[:2] + array[:2]]
        return F.mse_loss(h, y) + 0.01 * before

    model = Branching(loss_of)
    run.fit(model, run.trainer(max_epochs=2), run.loader(*pairs()))
    run.note("kept", [type(model.hits).__name__, int(model.hits), [numbers(one) for one in model.seen]])


@case
def in_validation(run: Run) -> None:
    class Validating(Branching):
        def validation_step(self, batch: Data, batch_idx: int) -> None:
            x, y = batch
            loss = F.mse_loss(self.layer(x).squeeze(-1), y)
            if loss < 1.1:
                self.log("small", loss)
                self.hits += 1
            self.log("val", loss)

    model = Validating(lambda self, h, y: F.mse_loss(h, y))
    run.fit(model, run.trainer(max_epochs=3), run.loader(*pairs()), run.loader(*pairs(64)))
    run.note("kept", model.hits)


@case
def hooks_look_at_gradients(run: Run) -> None:
    class Hooked(Branching):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen.append(float(self.layer.weight.grad.norm()))

    def loss_of(self: Branching, h: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h, y)
        return loss * 0.5 if loss > 1.0 else loss

    model = Hooked(loss_of)
    run.fit(model, run.trainer(max_epochs=2), run.loader(*pairs()))
    run.note("kept", model.seen)


@case
def optimized_by_hand_where_gradients_are_small(run: Run) -> None:
    class ByHand(Branching):
        def __init__(self) -> None:
            super().__init__(lambda self, h, y: F.mse_loss(h, y))
            self.automatic_optimization = False

        def training_step(self, batch: Data, batch_idx: int) -> None:
            x, y = batch
            one, other = self.optimizers()
            loss = self.loss_of(self, self.layer(x).squeeze(-1), y)
            one.zero_grad()
            other.zero_grad()
            self.manual_backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
            if float(norm) > 0.8:
                self.hits += 1
                other.step()
                self.lr_schedulers().step()
            if torch.isfinite(norm):
                one.step()
            self.log("train", loss)
            self.log("norm", norm)

        def configure_optimizers(self) -> Any:
            other = torch.optim.Adam([self.layer.bias], 0.05)
            return [torch.optim.SGD([self.layer.weight], 0.05, 0.9), other], [torch.optim.lr_scheduler.StepLR(other, 2, 0.5)]

    model = ByHand()
    run.fit(model, run.trainer(max_epochs=3), run.loader(*pairs()))
    run.note("kept", model.hits)


@case
def in_a_compiled_loop_with_a_branch_on_the_loss(run: Run) -> None:
    fabric: Any = Fabric(
        accelerator=run.accelerator, devices=run.devices, num_nodes=run.nodes, strategy=run.strategy, loggers=RecordingLogger(run)
    )
    fabric.launch()
    model = nn.Linear(4, 1)
    run.initialise(model)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 0.1))

    def step(batch: Data) -> Tensor:
        x, y = batch
        loss = F.mse_loss(model(x).squeeze(-1), y)
        optimizer.zero_grad()
        fabric.backward(loss * 0.5 if loss > 1.0 else loss)
        optimizer.step()
        return loss

    step = fabric.compile(step) if hasattr(fabric, "compile") else step
    for _ in range(2):
        for batch in fabric.setup_dataloaders(run.loader(*pairs())):
            run.record["losses"].append(numbers(fabric.all_reduce(step(batch).detach())))
    run.weights = {name: value.detach().float().cpu().numpy() for name, value in model.state_dict().items()}
