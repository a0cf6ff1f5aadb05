"""torchmetrics' compositions, wrappers and collections, logged as objects per step and per epoch, in training and validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from basics import class_data
from metrics_models import Measured, fit
from recording import Run, case, numbers
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection, MinMetric, R2Score, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    FeatureShare,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

COMPOSITIONS: dict[str, Callable[[], Metric]] = {
    "add": lambda: MeanMetric() + SumMetric(),
    "radd": lambda: 2.0 + MeanMetric(),
    "sub": lambda: MeanMetric() - 1,
    "mul": lambda: MeanMetric() * torch.tensor(2.5),
    "truediv": lambda: MeanMetric() / SumMetric(),
    "rtruediv": lambda: 1 / MeanMetric(),
    "floordiv": lambda: SumMetric() // 0.7,
    "mod": lambda: MeanMetric() % 10,
    "pow": lambda: MeanMetric() ** 2,
    "rpow": lambda: 2 ** MeanMetric(),
    "neg": lambda: -MeanMetric(),
    "abs": lambda: abs(MeanMetric() - 3),
    "lt": lambda: MeanMetric() < 0.5,
    "ge": lambda: MaxMetric() >= MinMetric(),
    "eq": lambda: MeanMetric() == MeanMetric(),
    "nested": lambda: (MeanMetric() + 1) * (SumMetric() - MinMetric()),
    "running": lambda: Running(MeanMetric(), window=3),
}


@case
def compositions(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.updated, self.idle = (
                nn.ModuleDict({f"{name}_": make() for name, make in COMPOSITIONS.items()}) for _ in range(3)
            )
            self.a, self.b = MeanMetric(), MeanMetric()
            self.sum = self.a + self.b  # all three are logged: each is reset with the others

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            value = logits.detach().pow(2).mean()
            for name, metric in self.called.items():
                metric(value)
                self.log(f"{stage}_{name}", metric, on_step=True, on_epoch=True)  # pyright: ignore[reportArgumentType]
            for name, metric in self.updated.items():
                metric.update(value)  # pyright: ignore[reportCallIssue]
                self.log(f"{stage}_{name}updated", metric, on_step=False, on_epoch=True)  # pyright: ignore[reportArgumentType]
            if stage == "val":
                self.log_dict(dict(self.idle.items()))  # pyright: ignore[reportArgumentType]  never updated
            self.sum.update(value)
            self.log_dict({"sum": self.sum, "a": self.a, "b": self.b}, on_step=False, on_epoch=True)
            self.log(f"{stage}_composed_here", (self.a * 2 - self.b).compute())

    fit(run, Model())


class Features(Metric):
    """A sum over what a network that it shares with others says."""

    feature_network = "net"

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        nn.init.constant_(self.net.weight, scale)
        nn.init.constant_(self.net.bias, scale)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total += self.net(x).sum()

    def compute(self) -> Tensor:
        return self.total  # pyright: ignore[reportReturnType]


@case
def wrappers(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.best = MinMaxMetric(MulticlassAccuracy(3))
            self.lately = Running(MulticlassAccuracy(3), window=2)
            self.outputs = MultioutputWrapper(MeanSquaredError(), 3)
            self.outputs_later = MultioutputWrapper(R2Score(), 3)
            self.tasks = MultitaskWrapper({"class": MulticlassAccuracy(3), "number": MeanSquaredError()}, prefix="of_")
            self.classes = ClasswiseWrapper(MulticlassRecall(3, average=None))
            self.tracker = MetricTracker(MulticlassRecall(3))
            self.shared = FeatureShare({"one": Features(1.0), "two": Features(2.0)})

        def on_train_epoch_start(self) -> None:
            self.tracker.increment()

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            if stage == "val":
                return
            scores, wanted = logits.detach(), F.one_hot(target, 3).float()
            self.log_dict({f"best_{name}": value for name, value in self.best(scores, target).items()}, on_epoch=True)
            self.lately(scores, target)
            self.log("lately", self.lately, on_step=True, on_epoch=True)
            self.log_dict({f"output_{i}": value for i, value in enumerate(self.outputs(scores, wanted))})
            self.outputs_later.update(scores, wanted)
            self.log("outputs", self.outputs_later, on_step=False, on_epoch=True, logger=False)  # of three elements
            targets = {"class": target, "number": target.float()}
            self.log_dict(self.tasks({"class": scores, "number": scores.sum(1)}, targets), on_epoch=True)
            self.classes.update(scores, target)
            self.log("tracked", self.tracker(scores, target))
            self.shared.update(scores)
            self.log_dict(self.shared, on_step=False, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.log_dict(self.classes.compute())
            self.log("best_of_epochs", self.tracker.best_metric())  # pyright: ignore[reportArgumentType]
            run.note(f"epoch {self.current_epoch}", [numbers(self.trainer.callback_metrics), self.tracker.compute_all()])
            for metric in (self.best, self.tasks, self.classes):
                metric.reset()

    fit(run, Model())


@case
def drawn_by_a_metric(run: Run) -> None:
    """The host's random stream is the same as in stock; a batch on eight devices has the order of one on one."""

    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.train_boot = BootStrapper(MeanSquaredError(), num_bootstraps=4, quantile=0.5, raw=True)
            self.val_boot = BootStrapper(MeanSquaredError(), num_bootstraps=3, sampling_strategy="multinomial")

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            if stage == "train":
                values = self.train_boot(logits.detach()[:, 0], target.float())
                self.log_dict({f"boot_{name}": value.mean() for name, value in values.items()}, on_epoch=True)
            else:
                self.val_boot.update(logits[:, 0], target.float())

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.val_boot.compute())
            self.val_boot.reset()

    torch.manual_seed(5)
    fit(run, Model())


@case
def collections_as_objects(run: Run) -> None:
    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            members: dict[str, Any] = {
                "acc": MulticlassAccuracy(3),
                "precision": MulticlassPrecision(3),
                "auroc": MulticlassAUROC(3, thresholds=5),
            }
            self.grouped = MetricCollection(members, prefix="grouped/")
            self.updated = self.grouped.clone(prefix="updated/", postfix="/x")
            self.apart = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)], compute_groups=False)
            inner = [MetricCollection({"a": MulticlassAccuracy(3)}, prefix="in_"), MetricCollection({"b": MulticlassRecall(3)})]
            self.nested = MetricCollection(inner, prefix="nested_")  # pyright: ignore[reportArgumentType]
            self.val = self.updated.clone(prefix="val/")
            self.one = MulticlassAccuracy(3)

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            scores = logits.detach().softmax(1)
            self.one(scores, target)  # in training and in validation
            self.log_dict({f"{stage}_first_name": self.one, f"{stage}_second_name": self.one}, on_step=True, on_epoch=True)
            if stage == "val":
                self.val.update(scores, target)
                self.log_dict(self.val)
                return
            for collection in (self.grouped, self.apart, self.nested):
                collection(scores, target)
                self.log_dict(collection, on_step=True, on_epoch=True)
            self.updated.update(scores, target)
            self.log_dict(self.updated, on_step=False, on_epoch=True)

    fit(run, Model())


@case
def moments_of_metrics(run: Run) -> None:
    """Logged in hooks, not in every batch, updated and reset by hand, and with several loaders."""

    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.in_hook, self.sometimes, self.by_hand = MeanMetric(), MulticlassAccuracy(3), SumMetric()
            self.twice, self.shared, self.late = self.in_hook * 2, MulticlassAccuracy(3), SumMetric()

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            if stage == "train":
                self.in_hook.update(logits.detach().mean())
                self.by_hand.update(target.sum())
                self.log("by_hand", self.by_hand, on_step=False, on_epoch=True)
                self.sometimes(logits.detach(), target)
                if batch_idx == 1:
                    self.log("sometimes", self.sometimes, on_step=True, on_epoch=True)
                    self.log("plain", logits.detach().sum(), on_step=True, on_epoch=True)
            else:
                self.shared(logits, target)
                self.log("shared", self.shared, on_step=True, on_epoch=True)
                self.late.update(target.sum())

        def note(self, moment: str) -> None:
            run.record.setdefault("seen", []).append([moment, numbers(dict(sorted(self.trainer.callback_metrics.items())))])

        def on_train_batch_end(self, *args: Any) -> None:
            self.note("batch")

        def on_train_epoch_end(self) -> None:
            self.log_dict({"in_hook": self.in_hook, "twice": self.twice})
            if self.current_epoch:
                self.note("epoch")  # fixes the values
            self.by_hand.reset()
            self.by_hand.update(7)

        def on_validation_start(self) -> None:
            self.log("early", 3.0)

        def on_validation_epoch_start(self) -> None:
            self.note("validation begins")

        def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
            self.note("validation batch")

        def on_validation_epoch_end(self) -> None:
            self.note("validation")
            self.log("late", self.late)

        def on_validation_end(self) -> None:
            self.note("validated")

    fit(run, Model(), loaders=2, num_sanity_val_steps=1)


@case
def values_of_other_kinds(run: Run) -> None:
    class Text(Metric):
        def update(self, x: Tensor) -> None:
            pass

        def compute(self) -> float:
            return 1.0

    class Whole(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, x: Tensor) -> None:
            self.total += x.sum()

        def compute(self) -> Tensor:
            return self.total  # pyright: ignore[reportReturnType]

    class Model(Measured):
        def __init__(self, metric: Metric, on_step: bool) -> None:
            super().__init__()
            self.metric, self.on_step = metric, on_step

        def measure(self, stage: str, logits: Tensor, target: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            if stage == "train":
                self.metric(logits.detach(), target) if isinstance(self.metric, ClasswiseWrapper) else self.metric(target)
                self.log("metric", self.metric, on_step=self.on_step, on_epoch=not self.on_step, prog_bar=True)
                self.log("weightless", logits.detach().mean(), on_step=False, on_epoch=True, batch_size=0)

    metrics = [Text(), ClasswiseWrapper(MulticlassAccuracy(3, average=None)), Whole()]
    for index, metric in enumerate(metrics):
        for on_step in (True, False):
            trainer = run.trainer(max_epochs=1)
            try:
                run.fit(Model(metric, on_step), trainer, run.loader(*class_data(32)))
                metrics_now = sorted(trainer.callback_metrics.items())
                found: Any = [[name, str(value.dtype)] for name, value in metrics_now if name != "weightless"]
            except ValueError as error:
                found = str(error).split(" Found ")[0]
            run.note(f"{index} {on_step}", found)


@case
def hooks_that_log_between(run: Run) -> None:
    """In an epoch's first batch a hook that logs after another one begins anew."""

    class Model(Measured):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            optimizer: Any = self.optimizers()
            for turn in range(2):
                loss = F.cross_entropy(self.layer(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.log(f"loss_{turn}", loss.detach(), on_step=True, on_epoch=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", self.layer.weight.grad.norm(), on_step=True, on_epoch=True)  # pyright: ignore

        def on_after_backward(self) -> None:
            self.log("largest", self.layer.weight.grad.abs().max(), on_step=True, on_epoch=True)  # pyright: ignore

    fit(run, Model())
