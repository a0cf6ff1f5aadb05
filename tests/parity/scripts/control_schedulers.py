"""Returns of ``configure_optimizers``, and when schedulers step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from basics import Classifier, Regression, class_data, regression_data
from lightning.pytorch.callbacks import LearningRateMonitor
from recording import Run, case
from torch.optim import lr_scheduler


def scheduled(configure: Any) -> pl.LightningModule:
    """A regression whose ``configure_optimizers`` is ``configure(sgd)``."""

    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            return configure(super().configure_optimizers())

    return Scheduled()


def fit_scheduled(run: Run, configure: Any, **options: Any) -> None:
    trainer = run.trainer(**{"max_epochs": 4, "callbacks": [LearningRateMonitor()], **options})
    run.fit(scheduled(configure), trainer, run.loader(*regression_data()), run.loader(*regression_data(32, 1)))


@case
def scheduler_in_two_lists(run: Run) -> None:
    fit_scheduled(run, lambda sgd: ([sgd], [lr_scheduler.StepLR(sgd, 1, 0.5)]))


@case
def scheduler_config_in_a_list(run: Run) -> None:
    fit_scheduled(run, lambda sgd: ([sgd], [{"scheduler": lr_scheduler.ExponentialLR(sgd, 0.9), "interval": "step"}]))


@case
def scheduler_in_a_dict(run: Run) -> None:
    fit_scheduled(run, lambda sgd: {"optimizer": sgd, "lr_scheduler": lr_scheduler.CosineAnnealingLR(sgd, 4)})


@case
def scheduler_config_in_a_dict(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        config = {"scheduler": lr_scheduler.StepLR(sgd, 1, 0.7), "interval": "step", "frequency": 3, "name": "mine"}
        return {"optimizer": sgd, "lr_scheduler": config}

    fit_scheduled(run, configure)


@case
def optimizer_in_a_list(run: Run) -> None:
    fit_scheduled(run, lambda sgd: [sgd], callbacks=[])


@case
def one_cycle_with_momentum(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        config = {"scheduler": lr_scheduler.OneCycleLR(sgd, max_lr=0.2, total_steps=16), "interval": "step"}
        return {"optimizer": sgd, "lr_scheduler": config}

    fit_scheduled(run, configure, callbacks=[LearningRateMonitor("step", log_momentum=True)])


@case
def plateau_of_the_validation_loss(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        plateau = lr_scheduler.ReduceLROnPlateau(sgd, factor=0.1, patience=0, threshold=0.9)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    fit_scheduled(run, configure, max_epochs=6)


@case
def plateau_of_the_training_loss_by_step(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        plateau = lr_scheduler.ReduceLROnPlateau(sgd, factor=0.5, patience=1, threshold=0.5)
        config = {"scheduler": plateau, "monitor": "train_loss_step", "interval": "step"}
        return {"optimizer": sgd, "lr_scheduler": config}

    fit_scheduled(run, configure)


@case
def plateau_without_its_metric(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": lr_scheduler.ReduceLROnPlateau(sgd), "monitor": "nothing"}}

    fit_scheduled(run, configure)


@case
def scheduler_every_second_epoch_with_accumulation(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(sgd, 1, 0.5), "frequency": 2}}

    fit_scheduled(run, configure, accumulate_grad_batches=3)


@case
def step_scheduler_with_accumulation(run: Run) -> None:
    def configure(sgd: torch.optim.Optimizer) -> dict:
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": lr_scheduler.StepLR(sgd, 2, 0.5), "interval": "step"}}

    fit_scheduled(run, configure, accumulate_grad_batches=3)


@case
def groups_with_their_own_rates(run: Run) -> None:
    class Grouped(Regression):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.layer.weight], "lr": 0.01, "weight_decay": 0.1}, {"params": [self.layer.bias]}]
            optimizer = torch.optim.AdamW(groups, lr=0.1)
            rates = [lambda epoch: 0.9**epoch, lambda epoch: 0.5**epoch]
            return [optimizer], [lr_scheduler.LambdaLR(optimizer, rates)]

    run.fit(Grouped(), run.trainer(max_epochs=3, callbacks=[LearningRateMonitor()]), run.loader(*regression_data()))


@case
def no_optimizer(run: Run) -> None:
    fit_scheduled(run, lambda sgd: None, callbacks=[])


@case
def own_scheduler_step(run: Run) -> None:
    class Own(Regression):
        def configure_optimizers(self) -> Any:
            sgd = super().configure_optimizers()
            return [sgd], [{"scheduler": lr_scheduler.StepLR(sgd, 1, 0.9), "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if self.global_step % 2 == 0:
                scheduler.step()

    run.fit(Own(), run.trainer(max_epochs=2), run.loader(*regression_data()))


@case
def learning_rate_set_by_hand(run: Run) -> None:
    class ByHand(Regression):
        def on_train_epoch_start(self) -> None:
            for group in self.optimizers().param_groups:
                group["lr"] = 0.05 / (1 + self.current_epoch)

    run.fit(ByHand(), run.trainer(max_epochs=3), run.loader(*regression_data()))


@case
def estimated_batches(run: Run) -> None:
    class Estimating(Regression):
        def configure_optimizers(self) -> Any:
            run.note("estimated", float(self.trainer.estimated_stepping_batches))
            run.note("world", [self.trainer.max_epochs, self.trainer.max_steps, self.trainer.accumulate_grad_batches])
            return super().configure_optimizers()

    run.fit(Estimating(), run.trainer(max_epochs=3, accumulate_grad_batches=2), run.loader(*regression_data(72)))


class WarmedUp(Classifier):
    """Sets options and steps the scheduler in the automatically optimized step, as a warm-up by hand does."""

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [sgd], [lr_scheduler.StepLR(sgd, 2, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        groups = self.optimizers().param_groups
        if self.trainer.global_step < 3:
            for group in groups:
                group["lr"] = 0.1 * (self.trainer.global_step + 1) / 3
        else:
            groups[0]["weight_decay"] = 0.01 * batch_idx
            self.lr_schedulers().step()
        self.log("rate", groups[0]["lr"])
        loss = self.step(batch, "train")
        return 2 * loss if loss > 1 else loss


class WatchedWarmUp(WarmedUp):
    def on_after_backward(self) -> None:
        self.log("bias", self.net[0].bias.grad.norm())


@case
def options_set_in_an_automatic_step(run: Run) -> None:
    ways: list[tuple[type, dict[str, Any]]] = [(WarmedUp, {}), (WarmedUp, {"accumulate_grad_batches": 3}), (WatchedWarmUp, {})]
    for kind, options in ways:
        torch.manual_seed(0)
        run.fit(kind(), run.trainer(max_epochs=2, gradient_clip_val=0.5, **options), run.loader(*class_data(96)))


@case
def scheduler_stepped_in_an_automatic_step(run: Run) -> None:
    class Cycled(Classifier):
        def configure_optimizers(self) -> Any:
            adam = torch.optim.AdamW(self.parameters(), lr=0.01)
            return {"optimizer": adam, "lr_scheduler": lr_scheduler.OneCycleLR(adam, 0.05, total_steps=40)}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            scheduler = self.lr_schedulers()
            scheduler.step()
            self.log("rate", scheduler.get_last_lr()[0])
            return self.step(batch, "train")

    run.fit(Cycled(), run.trainer(max_epochs=3), run.loader(*class_data(96)))
