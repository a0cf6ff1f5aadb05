"""One module in several runs, of one trainer and of two, and what is changed in between."""

from __future__ import annotations

from typing import Any

import torch
from basics import Regression, regression_data
from recording import Run, case
from torch import Tensor, nn


class Again(Regression):
    """A regression with all four steps, which use what can change between runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.offset = torch.zeros(1)
        self.table = torch.zeros(20_000)  # so large that it is not compared before every step
        self.name = "val"
        self.register_buffer("shift", torch.zeros(1))

    def value(self, batch: Any) -> Tensor:
        return self.scale * self.loss(batch) + self.offset + self.shift + self.table.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.name, self.value(batch).mean() + self.trainer.max_epochs + self.trainer.accumulate_grad_batches)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.value(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"value": self.value(batch), "scale": self.scale, "epochs": self.trainer.max_epochs, "batch": batch_idx}


@case
def runs_of_one_module(run: Run) -> None:
    model, trainer = Again(), run.trainer(max_epochs=2)
    loader = run.loader(*regression_data(40))
    run.initialise(model)
    trainer.fit(model, loader, loader)
    returned: list[Any] = []
    for _ in range(2):
        returned += trainer.validate(model, loader, verbose=False) + trainer.test(model, loader, verbose=False)
        returned += trainer.predict(model, loader)  # pyright: ignore[reportArgumentType]
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, loader, loader)
    returned += trainer.predict(model, loader)  # pyright: ignore[reportArgumentType]
    run.note("returned", returned)
    run.finish(model, trainer)


@case
def two_trainers_of_one_module(run: Run) -> None:
    model, loader = Again(), run.loader(*regression_data(40))
    run.initialise(model)
    returned: list[Any] = []
    for options in ({"max_epochs": 1}, {"max_epochs": 2, "accumulate_grad_batches": 2}, {"max_epochs": 1}):
        trainer = run.trainer(**options)  # pyright: ignore[reportArgumentType]
        trainer.fit(model, loader, loader)
        returned += trainer.validate(model, loader, verbose=False)
        returned += trainer.predict(model, loader)  # pyright: ignore[reportArgumentType]
    run.note("returned", returned)
    run.finish(model, trainer)


@case
def module_edited_between_runs(run: Run) -> None:
    model, trainer = Again(), run.trainer(max_epochs=1)
    loader = run.loader(*regression_data(40))
    run.initialise(model)
    returned: list[Any] = []

    def look() -> None:
        returned.extend(trainer.validate(model, loader, verbose=False))
        returned.extend(trainer.predict(model, loader))  # pyright: ignore[reportArgumentType]

    trainer.fit(model, loader)
    look()
    model.scale = 3.0
    look()
    model.offset.add_(1.0)
    look()
    model.table.numpy()[7] = 0.5
    look()
    model.table.data[11_111] = 0.25
    look()
    model.offset = torch.full((1,), 5.0)
    look()
    with torch.no_grad():
        model.shift.add_(2.0)
        model.layer.weight.mul_(0.5)
    look()
    model.name = "other"
    look()
    model.layer.register_forward_hook(lambda module, args, output: output + 1)
    look()
    model.loss = lambda batch: nn.functional.l1_loss(model(batch[0]), batch[1])  # pyright: ignore[reportAttributeAccessIssue]
    look()
    model.layer.bias.requires_grad_(False)
    second = run.trainer(max_epochs=1)
    second.fit(model, loader)
    look()
    run.note("returned", returned)
    run.finish(model, trainer)


@case
def optimizer_changed_between_fits(run: Run) -> None:
    class Changed(Again):
        def configure_optimizers(self) -> Any:
            kinds = [torch.optim.SGD, torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adagrad]
            options = [{"momentum": 0.9}, {"momentum": 0.0}, {}, {}, {"initial_accumulator_value": 0.5}]
            return kinds[self.fits](self.parameters(), lr=0.01, **options[self.fits])

    model = Changed()
    run.initialise(model)
    for fits in range(5):
        model.fits = fits  # pyright: ignore[reportAttributeAccessIssue]
        trainer = run.trainer(max_epochs=1, gradient_clip_val=0.1 if fits == 3 else None)
        trainer.fit(model, run.loader(*regression_data(40)))
    run.finish(model, trainer)
