"""Training loops, loaders, limits and logging of small models."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from recording import Run, case, main, numbers, recording_hooks
from torch import Tensor, nn


def regression_data(n: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return x, x @ torch.randn(8, 2, generator=generator) + 0.1 * torch.randn(n, 2, generator=generator)


def class_data(n: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return x, (x @ torch.randn(8, 3, generator=generator)).argmax(1)


class Regression(pl.LightningModule):
    """A linear layer, SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Classifier(pl.LightningModule):
    """A two-layer perceptron, Adam, accuracy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def step(self, batch: Any, prefix: str) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log_dict({f"{prefix}_loss": loss, f"{prefix}_accuracy": accuracy}, on_epoch=True, prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> dict:
        return {"loss": self.step(batch, "train"), "extra": batch[1]}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@case
def regression(run: Run) -> None:
    run.fit(Regression(), run.trainer(max_epochs=3), run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def classification(run: Run) -> None:
    run.fit(Classifier(), run.trainer(max_epochs=3), run.loader(*class_data()), run.loader(*class_data(40, 1)))


@case
def uneven_and_shuffled(run: Run) -> None:
    generator = torch.Generator().manual_seed(7)
    train = run.loader(*class_data(50), shuffle=True, generator=generator)
    run.fit(Classifier(), run.trainer(max_epochs=3), train, run.loader(*class_data(21, 1)))


@case
def shuffled_by_the_global_seed(run: Run) -> None:
    model = Regression()
    run.initialise(model)
    pl.seed_everything(99, verbose=False)
    run.fit(model, run.trainer(max_epochs=2), run.loader(*regression_data(), shuffle=True))


@case
def dropped_last_batch(run: Run) -> None:
    run.fit(Regression(), run.trainer(max_epochs=2), run.loader(*regression_data(50), drop_last=True))


class SeveralLoaders(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.log(f"own_name_{dataloader_idx}", loss * 2, add_dataloader_idx=False)


@case
def several_validation_loaders(run: Run) -> None:
    loaders = [run.loader(*regression_data(32, 1)), run.loader(*regression_data(20, 2))]
    run.fit(SeveralLoaders(), run.trainer(max_epochs=2), run.loader(*regression_data()), loaders)


class DictBatches(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])
        self.log("train_loss", loss)
        return loss


@case
def several_training_loaders(run: Run) -> None:
    loaders = {"a": run.loader(*regression_data()), "b": run.loader(*regression_data(32, 3))}
    run.fit(DictBatches(), run.trainer(max_epochs=2), loaders)


@case
def limits(run: Run) -> None:
    trainer = run.trainer(max_epochs=2, limit_train_batches=0.75, limit_val_batches=1, num_sanity_val_steps=0)
    run.fit(Regression(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def validation_every_two_batches(run: Run) -> None:
    trainer = run.trainer(max_epochs=2, val_check_interval=2)
    run.fit(Regression(), trainer, run.loader(*regression_data(80)), run.loader(*regression_data(32, 1)))


@case
def validation_by_fraction(run: Run) -> None:
    trainer = run.trainer(max_epochs=2, val_check_interval=0.5)
    run.fit(Regression(), trainer, run.loader(*regression_data(96)), run.loader(*regression_data(32, 1)))


@case
def validation_across_epochs(run: Run) -> None:
    trainer = run.trainer(max_epochs=3, val_check_interval=6, check_val_every_n_epoch=None)
    run.fit(Regression(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def validation_every_second_epoch(run: Run) -> None:
    trainer = run.trainer(max_epochs=5, check_val_every_n_epoch=2)
    run.fit(Regression(), trainer, run.loader(*regression_data(32)), run.loader(*regression_data(32, 1)))


@case
def overfitting(run: Run) -> None:
    trainer = run.trainer(max_epochs=3, overfit_batches=2)
    run.fit(Regression(), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def fast_dev_run(run: Run) -> None:
    run.fit(Regression(), run.trainer(fast_dev_run=True), run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def max_steps_in_mid_epoch(run: Run) -> None:
    run.fit(Regression(), run.trainer(max_steps=6), run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def logged_every_three_steps(run: Run) -> None:
    run.fit(Regression(), run.trainer(max_epochs=2, log_every_n_steps=3), run.loader(*regression_data()))


@case
def accumulated(run: Run) -> None:
    trainer = run.trainer(max_epochs=2, accumulate_grad_batches=3)
    run.fit(Classifier(), trainer, run.loader(*class_data(80)), run.loader(*class_data(32, 1)))


@case
def clipped_by_norm(run: Run) -> None:
    run.fit(Regression(), run.trainer(max_epochs=2, gradient_clip_val=0.1), run.loader(*regression_data()))


@case
def clipped_by_value(run: Run) -> None:
    trainer = run.trainer(max_epochs=2, gradient_clip_val=0.05, gradient_clip_algorithm="value")
    run.fit(Regression(), trainer, run.loader(*regression_data()))


class ClipsDifferently(pl.Callback):
    """Norms at first, tighter ones, values, nothing."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        trainer.gradient_clip_val = None if step > 5 else 0.1 / (1 + step)
        trainer.gradient_clip_algorithm = "value" if step > 3 else None


@case
def clipping_that_a_callback_changes(run: Run) -> None:
    trainer = run.trainer(max_epochs=2, gradient_clip_val=1.0, callbacks=[ClipsDifferently()])
    run.fit(Regression(), trainer, run.loader(*regression_data(64)))


class LogForms(Regression):
    """Every way to log a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        x = batch[0]
        self.log("default", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("epoch_only", loss, on_step=False, on_epoch=True)
        self.log("maximum", x.max(), on_epoch=True, reduce_fx="max")
        self.log("minimum", x.min(), on_epoch=True, reduce_fx=torch.min)
        self.log("total", x.sum(), on_epoch=True, reduce_fx="sum")
        self.log("weighted", loss, on_epoch=True, batch_size=1)
        self.log("constant", 3.5, on_epoch=True)
        self.log("of_numpy", np.float32(1.5), on_epoch=True)
        self.log("hidden", loss, logger=False)
        self.log("tensor_of_one", x.mean().reshape(1), prog_bar=True)
        self.log_dict({"d/a": loss, "d/b": x.mean()}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_default", loss)
        self.log("val_both", loss, on_step=True, on_epoch=True)
        self.log("val_maximum", loss, reduce_fx="max")
        self.log("val_synchronised", loss, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", float(self.current_epoch))

    def on_validation_epoch_end(self) -> None:
        self.log("at_val_epoch_end", torch.tensor(2.0))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("at_batch_end", outputs["loss"] * 2)


@case
def ways_to_log(run: Run) -> None:
    run.fit(LogForms(), run.trainer(max_epochs=2), run.loader(*regression_data(56)), run.loader(*regression_data(40, 1)))


class Partial(Classifier):
    """A frozen layer, and a layer that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


@case
def frozen_and_unused_parameters(run: Run) -> None:
    run.fit(Partial(), run.trainer(max_epochs=2), run.loader(*class_data()))


class SkippedSteps(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@case
def a_step_that_returns_none(run: Run) -> None:
    run.fit(SkippedSteps(), run.trainer(max_epochs=2), run.loader(*regression_data()))


@case
def epoch_in_the_loss(run: Run) -> None:
    class Annealed(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch) * (1 + 0.1 * self.current_epoch) + 0.01 * batch_idx
            self.log("train_loss", loss)
            self.log("seen_step", float(self.global_step))
            return loss

    run.fit(Annealed(), run.trainer(max_epochs=3), run.loader(*regression_data()))


@case
def attribute_changed_between_epochs(run: Run) -> None:
    class Scheduled(Regression):
        beta = 0.0

        def on_train_epoch_start(self) -> None:
            self.beta = float(self.current_epoch)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) + self.beta * self.layer.weight.square().sum()

    run.fit(Scheduled(), run.trainer(max_epochs=3), run.loader(*regression_data()))


@case
def outputs_collected_in_a_list(run: Run) -> None:
    class Collecting(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.collected: list[Tensor] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.collected.append(self(batch[0]).sum(1))

        def on_validation_epoch_end(self) -> None:
            run.record.setdefault("collected", []).append(numbers(torch.cat(self.collected)))
            self.collected.clear()

    run.fit(Collecting(), run.trainer(max_epochs=2), run.loader(*regression_data()), run.loader(*regression_data(40, 1)))


TRAINING_HOOKS = [f"on_train_{point}" for point in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")]
VALIDATION_HOOKS = [hook.replace("train", "validation") for hook in TRAINING_HOOKS]
OUTER_HOOKS = [*TRAINING_HOOKS, *VALIDATION_HOOKS, "setup", "teardown", "on_fit_start", "on_fit_end", "on_save_checkpoint"]
OUTER_CALLBACK_HOOKS = [*OUTER_HOOKS, "on_sanity_check_start", "on_sanity_check_end", "on_load_checkpoint", "on_exception"]
OUTER_MODULE_HOOKS = [
    *OUTER_HOOKS,
    *("prepare_data", "configure_model", "configure_optimizers", "configure_callbacks", "lr_scheduler_step"),
    *("on_validation_model_eval", "on_validation_model_train", "on_before_batch_transfer"),
]
INNER_HOOKS = ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"]


@case
def order_of_hooks(run: Run) -> None:
    model = recording_hooks(Regression, OUTER_MODULE_HOOKS, "module")()
    callback = recording_hooks(pl.Callback, OUTER_CALLBACK_HOOKS, "callback")()
    model.run = callback.run = run
    trainer = run.trainer(max_epochs=2, val_check_interval=2, callbacks=[callback])
    run.fit(model, trainer, run.loader(*regression_data(56)), run.loader(*regression_data(32, 1)))


@case
def order_of_hooks_in_the_step(run: Run) -> None:
    inner = [*INNER_HOOKS, "on_train_batch_start", "on_train_batch_end"]
    module_hooks = [*inner, "optimizer_zero_grad", "optimizer_step", "configure_gradient_clipping"]
    model = recording_hooks(Regression, module_hooks, "module")()
    callback = recording_hooks(pl.Callback, inner, "callback")()
    model.run = callback.run = run
    trainer = run.trainer(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[callback])
    run.fit(model, trainer, run.loader(*regression_data(80)))


@case
def gradients_changed_in_a_hook(run: Run) -> None:
    class Halved(Regression):
        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norms = [parameter.grad.norm().item() for parameter in self.parameters()]
            run.record.setdefault("norms", []).append(norms)

    run.fit(Halved(), run.trainer(max_epochs=2), run.loader(*regression_data()))


@case
def order_of_hooks_with_a_datamodule(run: Run) -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return run.loader(*regression_data(), shuffle=True)  # each time it is loaded, the generator moves on

        def val_dataloader(self) -> Any:
            return run.loader(*regression_data(32, 1))

    hooks = ["prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "on_before_batch_transfer", "state_dict"]
    data = recording_hooks(Data, hooks, "data")()
    data.run = run
    trainer = run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=2)
    run.fit(Regression(), trainer, datamodule=data)


@case
def resumed(run: Run) -> None:
    data, val = run.loader(*class_data()), run.loader(*class_data(32, 1))
    path = run.root / "mid.ckpt"
    first = run.trainer(max_epochs=2)
    run.fit(Classifier(), first, data, val)
    first.save_checkpoint(path)
    model, second = Classifier(), run.trainer(max_epochs=4)
    second.fit(model, data, val, ckpt_path=path)
    run.finish(model, second)


@case
def fitted_twice(run: Run) -> None:
    model = Regression()
    run.fit(model, run.trainer(max_epochs=1), run.loader(*regression_data()))
    trainer = run.trainer(max_epochs=2)
    trainer.fit(model, run.loader(*regression_data()))
    run.finish(model, trainer)
    with torch.no_grad():
        run.note("prediction after fit", model(regression_data(4, 5)[0]))


if __name__ == "__main__":
    main()
