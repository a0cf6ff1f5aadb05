"""Habits of scripts in the wild: logging from everywhere, queues, penalties now and then, lists of lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from basics import Classifier, Regression, class_data, regression_data
from recording import Run, case, numbers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset


class LoggingEverywhere(Regression):
    """Every way to reduce, and every hook that may log."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        error = (self(batch[0]) - batch[1]).abs().mean(1)
        self.log("max", error.max(), reduce_fx=torch.max, on_step=False, on_epoch=True)
        self.log("min", error.min(), reduce_fx="min", on_step=True, on_epoch=True)
        self.log("sum", error.sum(), reduce_fx="sum", on_epoch=True, prog_bar=True)
        self.log("weighted", loss, batch_size=batch_idx + 1, on_epoch=True)
        self.log("int", batch_idx)
        self.log("bool", batch_idx % 2 == 0, on_epoch=True)
        self.log_dict({"a/b": loss * 2, "a/c": 1.5}, logger=batch_idx % 2 == 0, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val", loss, on_step=True, on_epoch=True)
        self.log("val_max", loss, reduce_fx="max")
        self.log("val_rows", float(len(batch[0])), reduce_fx="sum")
        return loss

    def seen(self, where: str) -> None:
        trainer = self.trainer
        for kind in ("callback", "logged", "progress_bar"):
            self.notes.append([where, kind, numbers(dict(sorted(getattr(trainer, f"{kind}_metrics").items())))])

    def on_train_start(self) -> None:
        self.notes: list[Any] = []
        self.log("train_start", 1.0)

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", float(batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_end", outputs["loss"] * 3, on_step=True, on_epoch=True)
        self.seen(f"batch {batch_idx}")

    def on_validation_epoch_end(self) -> None:
        self.log("val_epoch_end", float(self.global_step))

    def on_train_epoch_end(self) -> None:
        self.log("epoch_end", self.trainer.callback_metrics["max"] * 2)
        self.seen("epoch end")


@case
def logged_from_everywhere(run: Run) -> None:
    model = LoggingEverywhere()
    trainer = run.trainer(max_epochs=2, log_every_n_steps=2, val_check_interval=2)
    run.fit(model, trainer, run.loader(*regression_data(56)), run.loader(*regression_data(40, 1)))
    run.note("seen", model.notes)


class Stream(IterableDataset):
    """No length, batches of different sizes, made by the dataset itself."""

    def __init__(self, sizes: list[int], devices: int) -> None:
        self.sizes, self.devices = sizes, devices

    def __iter__(self) -> Iterator[Any]:
        x, y = regression_data(sum(self.sizes))
        start = 0
        for size in self.sizes:
            yield x[start : start + size], y[start : start + size]
            start += size


@case
def stream_of_changing_batches(run: Run) -> None:
    sizes = [16, 8, 24, 16, 8, 40]
    train = DataLoader(Stream(sizes, run.devices), batch_size=None)
    trainer = run.trainer(max_steps=10, val_check_interval=4, limit_val_batches=2)
    run.fit(Regression(), trainer, train, DataLoader(Stream([16, 8, 16], run.devices), batch_size=None))


@case
def sharpness_aware(run: Run) -> None:
    class SAM(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = self.step(batch, "first")
            self.manual_backward(loss)
            params = [p for p in self.parameters() if p.grad is not None]
            norm = torch.norm(torch.stack([p.grad.norm(2) for p in params]), 2)
            moved = []
            with torch.no_grad():
                for p in params:
                    moved.append(p.grad * (0.05 / (norm + 1e-12)))
                    p.add_(moved[-1])
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
            with torch.no_grad():
                for p, e in zip(params, moved, strict=True):
                    p.sub_(e)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    run.fit(SAM(), run.trainer(max_epochs=2), run.loader(*class_data(48)), run.loader(*class_data(16, 1)))


@case
def penalty_now_and_then(run: Run) -> None:
    class Lazy(pl.LightningModule):
        """R1 penalty at every third batch; a scheduler that follows the validation loss."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            x = batch[0].requires_grad_(True)
            out = self.critic(x)
            loss = F.softplus(-out).mean()
            if batch_idx % 3 == 0:
                (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = loss + 5 * gradient.pow(2).sum(1).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("train", loss, prog_bar=True)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.critic(batch[0]).mean())

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.lr_schedulers().step(self.trainer.callback_metrics["val"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02, betas=(0.0, 0.99))
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)]

    run.fit(Lazy(), run.trainer(max_epochs=3), run.loader(*class_data(80)), run.loader(*class_data(16, 1)))


@case
def queue_of_keys(run: Run) -> None:
    class MoCo(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4)
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data.copy_(q.data)
                k.requires_grad = False
            generator = torch.Generator().manual_seed(0)
            self.register_buffer("queue", F.normalize(torch.randn(4, 64, generator=generator), dim=0))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def follow(self) -> None:
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1

        @torch.no_grad()
        def enqueue(self, keys: Tensor) -> None:
            columns = (self.pointer + torch.arange(keys.shape[0])) % 64
            self.queue[:, columns] = keys.T
            self.pointer[0] = (self.pointer[0] + keys.shape[0]) % 64

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            q = F.normalize(self.query(x), dim=1)
            with torch.no_grad():
                self.follow()
                k = F.normalize(self.key(x * 0.9), dim=1)
            positive = torch.einsum("nc,nc->n", q, k)[:, None]
            logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / 0.2
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
            self.enqueue(k)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.query.parameters(), lr=0.1)

    run.fit(MoCo(), run.trainer(max_epochs=2), run.loader(*class_data(48)))


@case
def outputs_collected_by_name(run: Run) -> None:
    class Collecting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: dict[str, list[Any]] = defaultdict(list)
            self.best = 0.0

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
            x, y = batch
            logits = self.net(x)
            self.outputs[f"loader_{dataloader_idx}"].append({"preds": logits.argmax(1), "y": y, "n": len(y)})
            self.log("loss", F.cross_entropy(logits, y), add_dataloader_idx=dataloader_idx > 0)
            return {"logits": logits}

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append([dataloader_idx, batch_idx, float(outputs["logits"].sum())])

        def on_validation_epoch_start(self) -> None:
            self.seen: list[Any] = []

        def on_validation_epoch_end(self) -> None:
            for name, found in self.outputs.items():
                right = torch.cat([one["preds"] == one["y"] for one in found]).float().mean()
                self.log(f"{name}_accuracy", right)
                self.log(f"{name}_n", float(sum(one["n"] for one in found)))
            self.best = max(self.best, float(right))
            self.log("best", self.best)
            self.outputs.clear()

    model = Collecting()
    loaders = [run.loader(*class_data(40, 1)), run.loader(*class_data(24, 2))]
    run.fit(model, run.trainer(max_epochs=2, limit_val_batches=0.7, num_sanity_val_steps=1), run.loader(*class_data(48)), loaders)


@case
def lists_of_lists(run: Run) -> None:
    class History(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[list[Tensor]] = []
            self.by_name = {"train": [], "val": []}

        def on_train_epoch_start(self) -> None:
            self.losses.append([])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.losses[-1].append(loss.detach())
            self.by_name["train"].append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.by_name.setdefault("val", []).append(self.loss(batch))

        def on_validation_epoch_end(self) -> None:
            self.log("val", torch.stack(self.by_name.pop("val")).mean())

    model = History()
    run.fit(model, run.trainer(max_epochs=4), run.loader(*regression_data(48)), run.loader(*regression_data(48, 1)))
    run.note("losses", model.losses)
    run.note("by_name", model.by_name)
