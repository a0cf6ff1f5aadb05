"""Habits of scripts in the wild: averages by hand, queues, penalties, penalties now and then, logging from everywhere."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from basics import Classifier, Regression, class_data, regression_data
from lightning.pytorch.utilities import grad_norm
from recording import GLOBAL_BATCH, Run, case, numbers
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler


class EMA(pl.Callback):
    """A copy of the model that follows it, put in its place for validation."""

    def __init__(self, decay: float = 0.8) -> None:
        self.decay, self.averages, self.backup = decay, {}, {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.averages:
            self.averages = {name: param.detach().clone() for name, param in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        for name, param in pl_module.named_parameters():
            self.averages[name].mul_(self.decay).add_(param.detach(), alpha=1 - self.decay)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.backup = {name: param.detach().clone() for name, param in pl_module.named_parameters()}
            for name, param in pl_module.named_parameters():
                param.data.copy_(self.averages[name])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.backup:
            for name, param in pl_module.named_parameters():
                param.data.copy_(self.backup[name])

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = dict(state_dict["averages"])


@case
def averaged_by_hand_and_resumed(run: Run) -> None:
    data, held_out = run.loader(*class_data(48)), run.loader(*class_data(32, 1))
    first, model = EMA(), Classifier()
    trainer = run.trainer(max_epochs=2, callbacks=[first])
    run.fit(model, trainer, data, held_out)
    trainer.save_checkpoint(run.root / "two.ckpt")
    second, model = EMA(), Classifier()
    trainer = run.trainer(max_epochs=3, callbacks=[second])
    trainer.fit(model, data, held_out, ckpt_path=run.root / "two.ckpt", weights_only=False)
    run.finish(model, trainer)
    run.note("averages", [first.averages, second.averages])


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


class EvenFirst(Sampler[int]):
    def __init__(self, n: int) -> None:
        self.n, self.epochs = n, 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        order = [*range(0, self.n, 2), *range(1, self.n, 2)]
        yield from order[self.epochs :] + order[: self.epochs]


@case
def own_samplers(run: Run) -> None:
    data = TensorDataset(*class_data(56))
    weights = torch.linspace(0.1, 1, 56)
    drawn = WeightedRandomSampler(weights, 40, generator=torch.Generator().manual_seed(3))
    run.fit(Classifier(), run.trainer(max_epochs=2), DataLoader(data, batch_size=run.batch_size, sampler=drawn))
    model = Classifier()
    run.initialise(model)
    trainer = run.trainer(max_epochs=2)
    trainer.fit(model, DataLoader(data, batch_sampler=BatchSampler(EvenFirst(56), run.batch_size, drop_last=True)))
    run.finish(model, trainer)


class Point(NamedTuple):
    x: Tensor
    meta: dict[str, Any]


@dataclasses.dataclass
class Rows:
    point: Point
    y: list[Tensor]
    names: list[str]
    scale: float
    nothing: None = None


def collate(rows: list[Any]) -> Rows:
    x, y = (torch.stack(column) for column in zip(*rows, strict=True))
    return Rows(Point(x, {"rows": len(rows), "deep": [x.mean(1), (y,)]}), [y[:, :1], y[:, 1:]], ["a"] * len(rows), 0.5)


@case
def nested_batches(run: Run) -> None:
    class Nested(Regression):
        def loss(self, batch: Rows) -> Tensor:
            found = self(batch.point.x) + batch.point.meta["deep"][0][:, None]
            return batch.scale * F.mse_loss(found, torch.cat(batch.y, 1)) / (1 if batch.nothing is None else 2)

    data = TensorDataset(*regression_data(40))
    run.fit(Nested(), run.trainer(max_epochs=2), DataLoader(data, batch_size=run.batch_size, collate_fn=collate))


@case
def batch_size_that_grows(run: Run) -> None:
    class Growing(Regression):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(*regression_data(64)), batch_size=run.batch_size * (1 + self.trainer.current_epoch))

    trainer = run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    run.fit(Growing(), trainer)


@case
def unfrozen_by_hand(run: Run) -> None:
    class Unfreezing(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
            for param in self.net[:2].parameters():
                param.requires_grad = False

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 0:
                self.net[1].eval()
            if self.current_epoch == 1:
                self.net[1].train()
                self.net[1].requires_grad_(True)
                self.optimizers().add_param_group({"params": list(self.net[1].parameters()), "lr": 0.1})
            if self.current_epoch == 2:
                self.net[0].weight.requires_grad = True
                self.optimizers().param_groups[0]["weight_decay"] = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    run.fit(Unfreezing(), run.trainer(max_epochs=3), run.loader(*class_data(48)), run.loader(*class_data(16, 1)))


@case
def gradients_logged_and_clipped_in_hooks(run: Run) -> None:
    class Watching(Regression):
        def on_after_backward(self) -> None:
            nn.utils.clip_grad_value_(self.parameters(), 0.5)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.log_dict(grad_norm(self.layer, norm_type=2))
            self.log("nan", float(any(not torch.isfinite(p.grad).all() for p in self.parameters() if p.grad is not None)))

    trainer = run.trainer(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.3)
    run.fit(Watching(), trainer, run.loader(*regression_data(80)))


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
def learned_in_an_inner_loop(run: Run) -> None:
    class MAML(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            params = dict(self.layer.named_parameters())
            half = len(x) // 2
            for _ in range(2):
                inner = F.mse_loss(torch.func.functional_call(self.layer, params, (x[:half],)), y[:half])
                grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
                params = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
            loss = F.mse_loss(torch.func.functional_call(self.layer, params, (x[half:],)), y[half:])
            self.log("outer", loss)
            return loss

    run.fit(MAML(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))


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
def weights_of_classes_made_in_setup(run: Run) -> None:
    class Weighted(Classifier):
        def setup(self, stage: str) -> None:
            labels = class_data(48)[1]
            self.register_buffer("weights", 1.0 / torch.bincount(labels, minlength=3).float(), persistent=False)
            self.smoothing = 0.0

        def on_train_epoch_end(self) -> None:
            self.smoothing += 0.05
            self.weights[self.current_epoch % 3] *= 2

        def step(self, batch: Any, prefix: str) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1], weight=self.weights, label_smoothing=self.smoothing)
            self.log(f"{prefix}_loss", loss)
            return loss

    run.fit(Weighted(), run.trainer(max_epochs=3), run.loader(*class_data(48)), run.loader(*class_data(16, 1)))


@torch.jit.script
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@case
def scripted_and_reparametrized(run: Run) -> None:
    class Odd(Classifier):
        def __init__(self) -> None:
            super().__init__()
            first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
            self.net = nn.Sequential(first, nn.utils.parametrizations.spectral_norm(nn.Linear(16, 3)))
            first.parametrizations.weight.original0.register_hook(lambda grad: grad * 0.5)

        def step(self, batch: Any, prefix: str) -> Tensor:
            hidden = torch.utils.checkpoint.checkpoint(self.net[0], batch[0], use_reentrant=False)
            loss = F.cross_entropy(self.net[1](swish(hidden)), batch[1])
            self.log(f"{prefix}_loss", loss)
            return loss

    run.fit(Odd(), run.trainer(max_epochs=2), run.loader(*class_data(48)), run.loader(*class_data(16, 1)))


@case
def teacher_copied_in_fit(run: Run) -> None:
    class Distilling(Classifier):
        teacher: Any = None

        def on_train_epoch_start(self) -> None:
            self.teacher = copy.deepcopy(self.net).eval().requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if self.current_epoch > 0:
                with torch.no_grad():
                    target = self.teacher(x).softmax(1)
                loss = loss + F.kl_div(self.net(x).log_softmax(1), target, reduction="batchmean")
            self.log("loss", loss)
            return loss

        def on_train_end(self) -> None:
            del self.teacher

    run.fit(Distilling(), run.trainer(max_epochs=3), run.loader(*class_data(48)))


@case
def intervals_and_limits(run: Run) -> None:
    options: list[dict[str, Any]] = [
        {"overfit_batches": 2, "max_epochs": 2},
        {"max_steps": 7, "check_val_every_n_epoch": None, "val_check_interval": 3},
        {"max_epochs": 2, "limit_train_batches": 0.5, "limit_val_batches": 1, "num_sanity_val_steps": -1},
        {"max_epochs": 3, "min_steps": 9, "check_val_every_n_epoch": 2, "accumulate_grad_batches": 3},
        {"fast_dev_run": 2},
    ]
    for one in options:
        model = Regression()
        run.initialise(model)
        trainer = run.trainer(**one)
        trainer.fit(model, run.loader(*regression_data(64)), run.loader(*regression_data(48, 1)))
        run.finish(model, trainer)


class Hyper(Regression):
    def __init__(self, lr: float = 0.05, decay: float = 0.0, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["extra"])

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().loss(batch) + self.hparams["decay"] * penalty

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hparams["decay"] = 0.01 * (self.global_step // 3)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.hparams["lr"] / (1 + self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


@case
def hyperparameters_that_hooks_change(run: Run) -> None:
    model = Hyper(extra=object())
    trainer = run.trainer(max_epochs=2)
    run.fit(model, trainer, run.loader(*regression_data(64)))
    trainer.save_checkpoint(run.root / "hyper.ckpt")
    again = Hyper.load_from_checkpoint(run.root / "hyper.ckpt", lr=0.5)
    run.note("hparams", dict(again.hparams))
    run.note("weight", again.layer.weight)


@case
def rows_that_are_weighed(run: Run) -> None:
    """Hard examples only: sorted losses, a mask, an index; the whole batch decides."""

    class Mining(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            losses = F.cross_entropy(self.net(x), y, reduction="none")
            hard, _ = losses.topk(GLOBAL_BATCH // 4)
            easy = torch.where(losses < losses.median(), losses, torch.zeros_like(losses))
            self.log("hard", hard.mean())
            weights = torch.zeros(3).index_add(0, y, torch.ones_like(losses))
            self.log_dict({f"class_{i}": weights[i] for i in range(3)})
            return hard.mean() + 0.1 * easy.sum() / (easy > 0).sum().clamp(min=1)

    run.fit(Mining(), run.trainer(max_epochs=2), run.loader(*class_data(48)))


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
