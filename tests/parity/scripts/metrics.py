"""torchmetrics inside steps and hooks, in every way in which it is documented to be used with Lightning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import metrics_objects  # noqa: F401
import torch
import torch.nn.functional as F
import torchmetrics
from basics import class_data
from metrics_models import Measured, fit
from recording import Run, case, main, reported_runs
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassPrecision


@case
def logged_as_objects(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.train_acc, self.val_acc = MulticlassAccuracy(3), MulticlassAccuracy(3, average="micro")
            self.only_step, self.f1 = MulticlassAccuracy(3), MulticlassF1Score(3)

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            if stage == "train":
                self.train_acc(logits, target)
                self.log("train_acc", self.train_acc, on_step=True, on_epoch=True, prog_bar=True)
                self.only_step(logits, target)
                self.log("only_step", self.only_step, on_step=True, on_epoch=False)
                self.f1(logits, target)
                self.log("f1", self.f1, on_step=False, on_epoch=True)
            else:
                self.val_acc.update(logits, target)
                self.log("val_acc", self.val_acc)

        def on_train_epoch_start(self) -> None:
            counts = [metric.update_count for metric in (self.train_acc, self.only_step, self.f1, self.val_acc)]
            run.note(f"counts at start of epoch {self.current_epoch}", counts)

        def on_train_epoch_end(self) -> None:
            run.note(f"at the end of epoch {self.current_epoch}", [self.train_acc.compute(), self.f1.compute()])
            run.note(f"counts at end of epoch {self.current_epoch}", [self.only_step.update_count, self.val_acc.update_count])

        def on_validation_epoch_end(self) -> None:
            run.note(f"validated {self.current_epoch} {self.trainer.sanity_checking}", self.val_acc.compute())

        def on_validation_end(self) -> None:
            run.note(f"count at the end of validation {self.current_epoch}", self.val_acc.update_count)

        def on_train_end(self) -> None:
            run.note("counts at the end", [metric.update_count for metric in (self.train_acc, self.only_step, self.f1)])

    fit(run, Model())
    causes = [cause for entry in reported_runs()[-1:] for cause in entry["recompilations"]]
    run.note("compiled again for what the module itself keeps", ["_metric_attributes" in str(causes)] if causes else [False])


@case
def values_used_afterwards(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.acc, self.mean = MulticlassAccuracy(3), torchmetrics.MeanMetric()
            self.history: list[Any] = []
            self.latest: Any = None

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            value = self.acc(logits, target)
            self.log(f"{stage}_value", value, on_step=True, on_epoch=True)
            self.log(f"{stage}_percent", 100 * value + batch_idx)
            self.log(f"{stage}_error", 1 - value.item())
            self.mean.update(logits.detach().pow(2).mean())
            self.log(f"{stage}_running", self.mean.compute())
            self.history.append(value)
            self.latest = {"stage": stage, "value": value, "twice": torch.stack([value, value]).sum()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            run.record.setdefault("latest", []).append(
                [self.latest["stage"], float(self.latest["value"]), float(self.latest["twice"])]
            )

    model = Model()
    fit(run, model)
    run.note("history", model.history)
    run.note("state", [model.acc.compute(), model.mean.compute(), model.acc.update_count])


@case
def collections(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            metrics = torchmetrics.MetricCollection(
                {"acc": MulticlassAccuracy(3), "precision": MulticlassPrecision(3), "auroc": MulticlassAUROC(3)}
            )
            self.train_metrics, self.val_metrics = metrics.clone(prefix="train/"), metrics.clone(prefix="val/", postfix="/mine")
            self.by_hand = torchmetrics.MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            probabilities = logits.softmax(1)
            if stage == "train":
                self.log_dict(self.train_metrics(probabilities, target))
                self.by_hand.update(preds=probabilities, target=target)
            else:
                self.val_metrics.update(probabilities, target)
                self.log_dict(self.val_metrics, on_step=False, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            run.note(f"by hand {self.current_epoch}", self.by_hand.compute())
            run.note(f"collected {self.current_epoch}", self.train_metrics.compute())
            self.by_hand.reset()
            self.train_metrics.reset()

    fit(run, Model())


@case
def states_that_are_lists(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.auroc, self.spearman = MulticlassAUROC(3, thresholds=None), torchmetrics.SpearmanCorrCoef()
            self.cat, self.binned = torchmetrics.CatMetric(), MulticlassAUROC(3, thresholds=5)

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            if stage == "val":
                self.auroc.update(logits.softmax(-1), target)
                self.binned.update(logits.softmax(-1), target)
                self.spearman.update(logits[:, 0], target.float())
                self.cat.update(logits.argmax(1))

        def on_validation_epoch_end(self) -> None:
            found = [metric.compute() for metric in (self.auroc, self.binned, self.spearman)]
            run.note(f"lists {self.current_epoch} {self.trainer.sanity_checking}", [*found, self.cat.compute().sort().values])
            self.log("auroc", found[0])
            for metric in (self.auroc, self.spearman, self.cat, self.binned):
                metric.reset()

    fit(run, Model())


@case
def several_loaders_and_containers(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.per_loader = nn.ModuleList([MulticlassAccuracy(3), MulticlassAccuracy(3)])
            self.per_stage = nn.ModuleDict({"train_": MulticlassF1Score(3), "val_": MulticlassF1Score(3)})
            self.wrapped = torchmetrics.ClasswiseWrapper(MulticlassAccuracy(3, average=None), labels=["a", "b", "c"])

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            self.per_stage[f"{stage}_"](logits, target)
            self.log(f"{stage}_f1", self.per_stage[f"{stage}_"], on_epoch=True)  # pyright: ignore[reportArgumentType]
            if stage == "val":
                self.per_loader[dataloader_idx](logits, target)
                self.log("acc", self.per_loader[dataloader_idx])  # pyright: ignore[reportArgumentType]
            else:
                self.log_dict(self.wrapped(logits, target))

    trainer = fit(run, Model(), loaders=2, num_sanity_val_steps=0)
    run.note("names", sorted(trainer.callback_metrics))


@case
def in_callbacks(run: Run) -> None:
    class Watching(pl.Callback):
        def __init__(self) -> None:
            self.acc = MulticlassAccuracy(3)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.acc.update(outputs["logits"], batch[1])

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("watched", self.acc.compute())
            self.acc.reset()

    class Model(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            logits = self.layer(batch[0])
            watching.acc.update(logits.flip(1), batch[1])
            return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits.detach()}

    watching = Watching()
    fit(run, Model(), callbacks=[watching])


@case
def states_in_checkpoints(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.scores = MulticlassAccuracy(3), torchmetrics.CatMetric()
            self.total.persistent(True)
            self.scores.persistent(True)

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            if stage == "train":
                self.total.update(logits, target)
                self.scores.update(logits[:, 0].mean())

    first = Model()
    run.initialise(first)  # not run.fit: at the end there are lists among the states
    trainer = run.trainer(max_steps=6, limit_val_batches=0)
    trainer.fit(first, run.loader(*class_data(56)))
    trainer.save_checkpoint(run.root / "middle.ckpt")
    run.note("before", [first.total.tp, first.total.fn, first.scores.compute()])
    again = Model()
    trainer = run.trainer(max_epochs=3, limit_val_batches=0)
    trainer.fit(again, run.loader(*class_data(56)), ckpt_path=str(run.root / "middle.ckpt"))
    run.note("after", [again.total.tp, again.total.fn, again.scores.compute()])


@case
def functions_of_torchmetrics(run: Run) -> None:
    from torchmetrics import functional as measures

    class Model(Measured):
        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            self.log("acc", measures.accuracy(logits, target, task="multiclass", num_classes=3))
            self.log("macro", measures.f1_score(logits, target, task="multiclass", num_classes=3, average="macro"), on_epoch=True)
            self.log("binary", measures.accuracy(logits[:, 0], (target == 0).long(), task="binary"))
            self.log("mse", measures.mean_squared_error(logits[:, 0], target.float()))

    fit(run, Model())


@case
def branch_over_the_whole_batch(run: Run) -> None:
    """Eager: a branch on an array of values. Every other line would show a batch, or a world, that is not the whole one."""

    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)
            self.seen, self.rows = torchmetrics.SumMetric(), torchmetrics.SumMetric()
            self.kept: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            features, target = self.norm(batch["x"]), batch["y"]
            similar = F.normalize(features) @ F.normalize(features).T  # rows against all other rows
            loss = F.cross_entropy(self.layer(self.dropout(features)), target, reduction="sum") + similar.mean()
            loss = loss + 0.01 * sum(len(name) for name in batch["name"])
            if loss.detach().numpy() > 5:
                loss = loss * 0.5
            self.seen(target)
            self.log("sum", target.sum().float(), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=True)
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            self.kept.append(target)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.rows.update(batch["y"].shape[0])

        def on_train_epoch_end(self) -> None:
            self.log("kept", torch.cat(self.kept).float().sum(), reduce_fx="sum", sync_dist=True)
            everywhere = torch.as_tensor(self.all_gather(torch.cat(self.kept)))
            run.note(f"epoch {self.current_epoch}", [self.rows.compute(), everywhere.reshape(-1)])
            self.kept.clear()

    x, y = class_data(56)
    samples = [{"x": x[i], "y": y[i], "name": "n" * (i % 5)} for i in range(len(x))]
    trainer = run.trainer(max_epochs=2)
    torch.manual_seed(3)
    run.fit(Model(), trainer, DataLoader(samples, batch_size=run.batch_size, shuffle=True))  # pyright: ignore[reportArgumentType]


@case
def used_in_the_loss(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.error = torchmetrics.MeanSquaredError()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.layer(batch[0])
            return F.cross_entropy(logits, batch[1]) + 0.1 * self.error(logits, F.one_hot(batch[1], 3).float())

    fit(run, Model())


class Weighted(torchmetrics.Metric):
    """A loss that is a metric, as chemprop's are."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("weights", weights)
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("rows", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.total = self.total + ((preds - target).square() * self.weights).sum()
        self.rows = self.rows + preds.shape[0]

    def compute(self) -> Tensor:
        return self.total / self.rows


@case
def the_loss_is_a_metric(run: Run) -> None:
    class Model(Measured):
        def __init__(self, *, manual: bool) -> None:
            super().__init__()
            self.criterion = Weighted(torch.tensor([1.0, 2.0, 0.5]))
            self.both = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits, target = self.layer(batch[0]), F.one_hot(batch[1], 3).float()
            loss = self.criterion(logits, target)
            self.log("criterion", self.criterion, on_step=True, on_epoch=True)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                return None
            found = self.both(logits, target)
            self.log("twice", 2 * loss, on_epoch=True)
            return {"loss": 0.1 * (loss + 3 * found["MeanSquaredError"]) + sum(found.values())}

        def on_train_epoch_end(self) -> None:
            self.log_dict(self.both.compute()) if self.automatic_optimization else None
            self.both.reset()

    for manual in (False, True):
        fit(run, Model(manual=manual))


@case
def branch_on_a_metric(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.acc = MulticlassAccuracy(3)
            self.best = 0.0

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            if self.acc(logits, target) > 0.5:
                self.log("good", 1.0)

    fit(run, Model())


if __name__ == "__main__":
    main()
