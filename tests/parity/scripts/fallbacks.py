"""Steps that turn out not to be compilable: nothing of the attempt is left, and code around the step does not run twice."""

from __future__ import annotations

import contextvars
import ctypes
import random
from types import SimpleNamespace
from typing import Any

import fallbacks_tensors  # noqa: F401
import numpy as np
import torch
from basics import Regression, regression_data
from recording import Run, case, main
from semantics_models import BackwardInTheStep, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader

COUNTED = contextvars.ContextVar("COUNTED", default=0)


@case
def a_buffer_becomes_double_between_hooks(run: Run) -> None:
    class Growing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("grown", torch.ones(1), persistent=False)
            self.calls: list[str] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.grown.mean()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]

        def on_before_backward(self, loss: Tensor) -> None:
            self.grow("on_before_backward")

        def on_after_backward(self) -> None:
            self.calls.append("on_after_backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.grow("on_before_optimizer_step")

        def grow(self, hook: str) -> None:
            self.grown = torch.ones(len(self.grown) + 1, dtype=torch.float64)
            self.calls.append(hook)

    model = Growing()
    fit(run, model)
    run.note("calls", model.calls)
    run.note("grown", len(model.grown))


@case
def an_array_is_changed_after_it_is_a_tensor(run: Run) -> None:
    """Which has its memory."""

    class Reading(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            order = (x.sum(1) * self.layer.weight.detach().mean()).argsort().numpy()
            rows = torch.from_numpy(order)
            order //= 2
            return super().training_step([x[rows], y[rows]], batch_idx)

    fit(run, Reading())


@case
def an_array_is_changed_by_way_of_a_view_of_it(run: Run) -> None:
    class Reading(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            order = (x.sum(1) * self.layer.weight.detach().mean()).argsort().numpy()
            view = np.transpose(order)
            view //= 2
            rows = torch.from_numpy(order)
            return super().training_step([x[rows], y[rows]], batch_idx)

    fit(run, Reading())


@case
def a_buffer_grows_in_validation(run: Run) -> None:
    class Growing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("grown", torch.ones(1), persistent=False)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.grown = torch.cat([self.grown, torch.ones(1)])
            self.log("grown", super().training_step(batch, batch_idx) * len(self.grown))

    model = Growing()
    fit(run, model, val=True, max_epochs=4)
    run.note("grown", len(model.grown))


@case
def hooks_of_a_step_change_the_defaults_of_a_function(run: Run) -> None:
    def factor(a: float = 1.0, *, k: float = 0.5) -> float:
        return a + k

    class Changing(Regression):
        def __init__(self, in_step: bool) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.held, self.in_step = SimpleNamespace(factor=factor), in_step
            self.turns = ctypes.c_double(1.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            scale = self.held.factor()
            for _ in range(int(self.turns.value)):
                scale = scale * 0.9
            if self.in_step:
                self.change()
            loss = super().training_step(batch, batch_idx) * scale
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.turns.value += 1
            return loss

        def on_after_backward(self) -> None:
            if not self.in_step:
                self.change()

        def change(self) -> None:
            last = factor.__defaults__[0]  # pyright: ignore[reportOptionalSubscript]
            factor.__defaults__, factor.__kwdefaults__ = (0.8 * last,), {"k": 0.1 + last}

    for in_step in (False, True):
        fit(run, Changing(in_step), max_epochs=1)
        run.note(f"last {in_step}", factor())


class Stepping(Regression):
    """Writes down what happens around its closure, and counts steps in a place that compiled steps do not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        COUNTED.set(COUNTED.get() + 1)
        return super().training_step(batch, batch_idx) * COUNTED.get()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.calls.append("before")
        optimizer.param_groups[0]["lr"] *= 0.9
        loss = optimizer.step(closure=optimizer_closure)
        self.calls.append(loss.item())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("on_before_optimizer_step")


@case
def inside_the_closure_of_an_optimizer_step(run: Run) -> None:
    COUNTED.set(0)
    model = Stepping()
    fit(run, model, n=48)
    run.note("calls", model.calls)
    run.note("counted", COUNTED.get())


@case
def inside_a_closure_while_gradients_accumulate(run: Run) -> None:
    COUNTED.set(0)
    model = Stepping()
    fit(run, model, n=48, accumulate_grad_batches=2, gradient_clip_val=0.5)
    run.note("calls", model.calls)


class Counted(type):
    steps = 0


class Registry(metaclass=Counted):
    """A class with a class of its own."""


@case
def counted_in_a_class_of_classes(run: Run) -> None:
    class Counting(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            type(Registry).steps += 1
            return super().training_step(batch, batch_idx) * type(Registry).steps

    Counted.steps = 0
    fit(run, Counting())
    run.note("steps", Counted.steps)


@case
def raises_in_the_closure_of_an_optimizer_step(run: Run) -> None:
    class Raising(Stepping):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls.append("training_step")
            if batch_idx == 1:
                raise ValueError("this batch is wrong")
            return Regression.training_step(self, batch, batch_idx)

    model = Raising()
    try:
        fit(run, model)
    except ValueError as error:
        run.note("error", str(error))
    run.note("calls", model.calls)


@case
def a_size_of_the_batch_before_one_of_the_results(run: Run) -> None:
    class Both(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            rows = int((batch[0][:, 0] > -9).sum())  # which alone is known
            loss = super().training_step((batch[0][:rows], batch[1][:rows]), batch_idx)
            self.log("kinds", float(len(torch.unique(self(batch[0]).detach().round()))))  # the reason
            return loss

    fit(run, Both())


@case
def entries_under_values_of_the_batch(run: Run) -> None:
    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.kept: dict[int, Tensor] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.kept[self.count.item()] = batch[0].mean(0)  # pyright: ignore[reportCallIssue, reportArgumentType]
            self.count += 1
            return super().training_step(batch, batch_idx)

    model = Keeping()
    fit(run, model)
    run.note("kept", [[key, value] for key, value in model.kept.items()])


@case
def hooks_before_optimizer_steps_registered_late(run: Run) -> None:
    class Late(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.optimizers().register_step_pre_hook(lambda *_: run.record["hooks"].append(self.global_step))  # pyright: ignore[reportAttributeAccessIssue]

    fit(run, Late())


@case
def a_parameter_leaves_the_module(run: Run) -> None:
    class Leaving(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.inner.weight.square().sum()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 2:  # what the optimizer has gets no gradient any more
                torch.nn.utils.parametrize.remove_parametrizations(self.inner, "weight")
                self.trainer.optimizers[0].add_param_group({"params": [self.inner.weight]})

    fit(run, Leaving())


@case
def a_tensor_of_the_step_is_resized_in_a_hook(run: Run) -> None:
    class Resizing(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.held = [torch.ones(2)]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.held[0].sum()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                self.held[0].resize_(3).fill_(0.5)

    fit(run, Resizing())


@case
def forward_under_an_optimizer_without_gradients(run: Run) -> None:
    class Closed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            if loss.item() > 0:
                super().step()
            return loss

    class Asking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            run.record["hooks"].append(torch.is_grad_enabled())
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return Closed(self.parameters(), lr=0.1)

    fit(run, Asking())


@case
def python_in_the_step_of_an_optimizer(run: Run) -> None:
    calls: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append(len(calls))
            return super().step(closure)

    class Counted(Regression):
        def configure_optimizers(self) -> Any:
            return Counting(self.parameters(), lr=0.1)

    fit(run, Counted())
    run.note("calls", calls)


@case
def an_optimizer_that_nobody_has_returned(run: Run) -> None:
    class Own(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.own = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.own.zero_grad()
            self.manual_backward(loss)
            self.own.step()
            return loss

        def configure_optimizers(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            return None

    fit(run, Own())


@case
def what_was_drawn_for_a_program_that_cannot_be_made(run: Run) -> None:
    class Drawing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            scale = float(np.random.rand()) + random.random()
            halves = batch[0].long().view(torch.int32)  # what 64 bits hold: not computed where those are 32
            return super().training_step(batch, batch_idx) * scale + halves.abs().max()

    np.random.seed(0)
    random.seed(0)
    fit(run, Drawing())
    run.note("next", [float(np.random.rand()), random.random()])


@case
def writes_to_a_slice_whose_place_is_drawn(run: Run) -> None:
    class Scaling(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch[0].clone(), batch[1]
            start = random.randint(0, x.shape[1] - 2)
            x[:, start : start + 2].mul_(2.0)
            return super().training_step((x, y), batch_idx)

    random.seed(0)
    fit(run, Scaling())


@case
def uses_a_slice_whose_tensor_was_written_to(run: Run) -> None:
    class Halving(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch[0].clone(), batch[1]
            start = random.randint(0, x.shape[1] - 2)
            part = x[:, start : start + 2].T
            x.mul_(0.5)
            return super().training_step((x, y), batch_idx) * part.abs().mean()

    random.seed(0)
    fit(run, Halving())


@case
def makes_modules_and_parameters_in_the_step(run: Run) -> None:
    """What the step makes is the module's own from then on, with the values that it was made with."""

    class Making(Regression):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.where, self.kept, self.made = where, {}, None
            self.seen: list[Any] = []

        def make(self, width: int) -> torch.nn.Module:
            if self.where == "forward":
                self.made = self.made or torch.nn.Linear(width, width)
                return self.made
            if self.where == "dict" and "layer" in self.kept:
                return self.kept["layer"]
            if self.where == "parameter":
                self.layer.weight = torch.nn.Parameter(self.layer.weight.detach() * 0.9)
            self.kept["layer"] = torch.nn.Linear(width, width)
            return self.kept["layer"]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = torch.tanh(self.make(batch[0].shape[1])(batch[0]))
            loss = super().training_step((x, batch[1]), batch_idx)
            return {"loss": loss, "made": self.kept if self.where == "result" else None}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            made = (outputs["made"] or self.kept).get("layer", self.made)
            self.seen.append([made.weight.sum(), self.layer.weight.sum()])

    for where in ("forward", "dict", "parameter", "result"):
        model = Making(where)
        torch.manual_seed(1)
        fit(run, model)
        run.note(where, model.seen)


@case
def parameters_that_show_one_memory(run: Run) -> None:
    class Tied(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.second.weight.data = self.first.weight.data

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.second(torch.tanh(self.first(x))))

    fit(run, Tied())


@case
def a_backward_pass_in_the_step_while_gradients_accumulate(run: Run) -> None:
    fit(run, BackwardInTheStep(), accumulate_grad_batches=2)


class MovingCodebook(Regression):
    """A codebook with running means, which are new parameters in each step; the optimizer has those of the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = nn.Parameter(torch.ones(4))
        self.codes = nn.Embedding(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        nearest = torch.cdist(out, self.codes.weight).argmin(1)
        chosen = nn.functional.one_hot(nearest, 4).float()
        self.sizes = nn.Parameter(0.9 * self.sizes + 0.1 * chosen.sum(0))
        self.codes.weight = nn.Parameter(0.9 * self.codes.weight + 0.1 * (chosen.t() @ out) / self.sizes.unsqueeze(1))
        return super().training_step(batch, batch_idx) + 0.1 * (out - self.codes.weight.detach()[nearest]).square().mean()


@case
def parameters_are_replaced_in_the_step(run: Run) -> None:
    fit(run, MovingCodebook(), val=True)


@case
def a_parameter_is_made_in_the_step(run: Run) -> None:
    class Scaled(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.full((2,), 0.5))
            return (self(batch[0]) * self.scale - batch[1]).square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            names.append([name for name, _ in self.named_parameters()])

    names: list[Any] = []
    fit(run, Scaled())
    run.note("names", names)


class Tripled(Tensor):
    """Tensors of a class of their own, as torchvision's images and masks are."""

    def __mul__(self, other: Any) -> Any:
        return super().__mul__(3 * other)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: Any = super().__torch_function__(func, types, args, kwargs)
        return found / 2 if func is torch.tanh else found


@case
def tensors_of_a_class_of_their_own_in_the_batch(run: Run) -> None:
    class Asking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = torch.tanh(x * 2) if isinstance(x, Tripled) else x
            return super().training_step((torch.Tensor.as_subclass(x, Tensor), y), batch_idx)

    def collate(rows: list[Any]) -> list[Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return [x.as_subclass(Tripled), y]

    rows = list(zip(*regression_data(), strict=True))
    loader = DataLoader(rows, batch_size=run.batch_size, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    run.fit(Asking(), run.trainer(max_epochs=2), loader)


if __name__ == "__main__":
    main()
