"""Precisions: which dtype everything has that a user can see, and the numbers, in each mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from basics import class_data
from lightning.pytorch.plugins import MixedPrecision
from recording import Run, case, describe, main
from torch import Tensor, nn


class Seen(pl.LightningModule):
    """Writes down the dtypes inside and outside of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, Any] = {}

    def step(self, batch: Any, name: str) -> tuple[Tensor, dict[str, Any]]:
        x, y, half = batch
        hidden = self.net[0](x)
        logits = self.net(x) * self.scale
        loss = F.cross_entropy(logits, y)
        seen = {
            "batch": describe([x[0], y[0], half[0]]),
            "parameters": str(self.net[0].weight.dtype),
            "buffers": [str(self.scale.dtype), str(self.count.dtype)],
            "linear": str(hidden.dtype),
            "norm": str(self.net[1](hidden).dtype),
            "softmax": str(F.softmax(logits, -1).dtype),
            "sum": str((logits.sum() + x.sum()).dtype),
            "matmul": str((x @ x.T).dtype),
            "loss": str(loss.dtype),
            "new tensor": str(torch.ones(2).dtype),
            "python number": str(torch.tensor(0.5).dtype),
            "default": str(torch.get_default_dtype()),
            "autocast": [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))],
            "module": str(self.dtype),
        }
        self.log(f"{name}_loss", loss, on_step=name == "train", on_epoch=True, prog_bar=True)
        self.log(f"{name}_mean", logits.mean())
        self.log(f"{name}_wide", logits.mean().double() / 3)
        self.log(f"{name}_single", logits.mean().float() / 4)
        self.log(f"{name}_half", (logits.mean() / 3).bfloat16())
        self.log(f"{name}_whole", y.sum())
        self.log(f"{name}_number", 1 / 3)
        return loss, seen

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.count += 1
        loss, seen = self.step(batch, "train")
        return {"loss": loss, "twice": 2 * loss.detach(), "seen": seen}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss, seen = self.step(batch, "val")
        return {"loss": loss, "seen": seen}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]), batch[0][:, 0] + batch[2]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen["before transfer"] = describe([leaf[0] for leaf in batch])
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen["after transfer"] = describe([leaf[0] for leaf in batch])
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Descends(Seen):
    """By plain SGD: float16 has no room for AdamW's squares and its eps, torch's update is NaN there."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Hooks(pl.Callback):
    """The same from outside."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def note(self, name: str, pl_module: Any, *values: Any) -> None:
        self.seen[name] = [describe(value) for value in values]
        self.seen[f"{name}, default"] = str(torch.get_default_dtype())
        self.seen[f"{name}, parameters"] = str(pl_module.net[0].weight.dtype)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.note("setup", pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("fit start", pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch start", pl_module, *[leaf[0] for leaf in batch])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch end", pl_module, outputs)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.note("validation end", pl_module, outputs)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("epoch end", pl_module, dict(trainer.callback_metrics), dict(trainer.logged_metrics))


class Gradients(pl.Callback):
    """Sees gradients, which cuts the program after them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append([describe(p.grad) for p in pl_module.parameters()])


def loaders(run: Run, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [run.loader(x.to(dtype), y, x[:, 0].bfloat16()) for x, y in (class_data(48), class_data(32, 1))]


def in_precision(
    run: Run, precision: Any, dtype: torch.dtype = torch.float32, model: Seen | None = None, *, further: bool = False
) -> None:
    """Fit, and write down every dtype; with ``further`` save, load, validate and predict too."""
    model, hooks = model or Seen(), Hooks()
    trainer = run.trainer(max_epochs=2, precision=precision, callbacks=[hooks])
    train, val = loaders(run, dtype)
    run.fit(model, trainer, train, val)
    run.note("seen", {"module": model.seen, "hooks": hooks.seen})
    run.note("precision", [str(trainer.precision), str(model.dtype), str(torch.get_default_dtype())])
    run.note("state", describe(dict(model.state_dict())))
    run.note("optimizer", describe(trainer.optimizers[0].state_dict()["state"]))
    run.note("metrics", {name: [str(v.dtype), float(v)] for name, v in trainer.callback_metrics.items()})
    if further:
        trainer.save_checkpoint(run.root / "last.ckpt")
        again = type(model).load_from_checkpoint(run.root / "last.ckpt", weights_only=False)
        run.note("loaded", describe(dict(again.state_dict())))
        run.note("validated", trainer.validate(model, val, verbose=False))
        predictions = trainer.predict(model, val)
        run.note("predicted", [describe([leaf[0] for leaf in one]) for one in predictions])
    run.note("afterwards", [str(model.dtype), str(torch.get_default_dtype()), torch.is_autocast_enabled("cpu")])


@case
def full_of_double_batches(run: Run) -> None:
    class Narrows(Seen):
        def step(self, batch: Any, name: str) -> Any:
            return super().step([batch[0].float(), *batch[1:]], name)

    in_precision(run, None, torch.float64, Narrows())


@case
def full_of_double_batches_as_they_are(run: Run) -> None:
    in_precision(run, None, torch.float64)


@case
def double(run: Run) -> None:
    in_precision(run, "64-true", further=True)


@case
def single_after_double(run: Run) -> None:
    x, y = class_data()
    trainer = run.trainer(max_epochs=1, precision="64-true", limit_train_batches=1)
    trainer.fit(NumbersInDouble(), run.loader(x, y))
    in_precision(run, "32-true", further=True)


class NumbersInDouble(pl.LightningModule):
    """Numbers of Python's in a step of 64 bits, which a hook changes, and rates that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.factor = 1 / 3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.layer(batch[0]) * self.factor, batch[1]) / (1.1 + self.current_epoch / 7)
        loss = loss + self.layer.weight.square().sum() * (batch_idx / 300)
        self.log("factor", self.factor * batch_idx)
        self.log("made", torch.tensor(self.factor) / (1 + batch_idx))
        self.log("of_whole", batch[1].sum() * self.factor)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        one = torch.optim.SGD(self.parameters(), lr=0.1, momentum=1 / 7)
        return [one], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(one, 1 / 1.3), "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.factor = self.factor * 1.1 + 1 / 9 - float(outputs["loss"].detach()) / 30
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] = self.factor / 90
        if batch_idx % 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 10 / 9


@case
def double_with_numbers(run: Run) -> None:
    x, y = class_data()
    run.fit(NumbersInDouble(), run.trainer(max_epochs=2, precision="64-true"), run.loader(x, y))


class ClippedInDouble(pl.LightningModule):
    """A limit of gradients and rates that 24 bits do not hold."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self._make = nn.Linear(8, 3), make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        one = self._make(self.parameters())
        return [one], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(one, 1 / 1.3), "interval": "step"}]


class Decayed(torch.optim.Optimizer):
    """A rule of the user's with numbers of its own, some of them in its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.3, "decay": 1 / 7})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["sum"] = state.get("sum", 0.1) + group["lr"] / 3
                param.mul_(1 - group["lr"] * group["decay"]).sub_(param.grad * (group["lr"] / state["sum"]))
        return loss


@case
def double_clipped(run: Run) -> None:
    x, y = class_data()
    for algorithm in ("norm", "value"):
        for make in (lambda params: torch.optim.SGD(params, 0.3), lambda params: torch.optim.Adam(params, 0.1), Decayed):
            options = {"gradient_clip_val": 1 / 30, "gradient_clip_algorithm": algorithm}
            run.fit(ClippedInDouble(make), run.trainer(max_epochs=2, precision="64-true", **options), run.loader(x, y))


class Rows:
    """A batch of a class of its own, as graphs are; precisions convert what is in containers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, **_: Any) -> Rows:
        return Rows(self.x.to(device), self.y.to(device))


class TakesRows(NumbersInDouble):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, beside = batch if isinstance(batch, list) else (batch, batch.x)
        self.log("single", rows.x.dtype == torch.float32)
        self.log("single_beside", beside.dtype == torch.float32)
        self.log("third", (rows.x / 3).sum())
        return super().training_step([rows.x.to(self.layer.weight.dtype), rows.y], batch_idx)


@case
def double_with_objects_in_batches(run: Run) -> None:
    x, y = class_data()
    rows = [Rows(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
    for batches in (rows, [[one, one.x] for one in rows]):
        loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
        run.fit(TakesRows(), run.trainer(max_epochs=2, precision="64-true"), loader)


class Total(torchmetrics.Metric):
    """A mean whose state takes the dtype of what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total, self.count = self.total + x.sum(), self.count + x.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class LogsValuesOfMetrics(pl.LightningModule):
    """Logs what calls of metrics give: values in the dtype that they have, and an epoch's in that of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.total, self.doubled, self.error = Total(), Total(), torchmetrics.MeanSquaredError()

    def step(self, x: Tensor, name: str, on_step: bool) -> Tensor:
        out = self.layer(x)
        options = {"on_step": on_step, "on_epoch": True, "batch_size": len(x)}
        self.log(f"{name}_total", self.total(out), **options)
        self.log(f"{name}_doubled", self.doubled(out.double()), **options)
        if on_step:  # it adds in place, which torch refuses to a state of a validation
            self.log(f"{name}_error", self.error(out, torch.zeros_like(out)), **options)
        return out.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch[0], "train", True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch[0], "val", False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@case
def double_values_of_metrics(run: Run) -> None:
    x, y = class_data()
    trainer = run.trainer(max_epochs=2, precision="64-true")
    run.fit(LogsValuesOfMetrics(), trainer, run.loader(x, y), run.loader(x, y))
    run.note("metrics", {name: [str(value.dtype), float(value)] for name, value in trainer.callback_metrics.items()})


@case
def double_values_of_metrics_in_single(run: Run) -> None:
    x, y = class_data()
    trainer = run.trainer(max_epochs=2)
    run.fit(LogsValuesOfMetrics(), trainer, run.loader(x, y), run.loader(x, y))
    run.note("metrics", {name: [str(value.dtype), float(value)] for name, value in trainer.callback_metrics.items()})


@case
def bf16_mixed(run: Run) -> None:
    in_precision(run, "bf16-mixed", further=True)


@case
def bf16_true(run: Run) -> None:
    in_precision(run, "bf16-true", further=True)


@case
def fp16_mixed(run: Run) -> None:
    in_precision(run, "16-mixed")


@case
def fp16_true(run: Run) -> None:
    in_precision(run, "16-true", model=Descends())


@case
def aliases(run: Run) -> None:
    run.note("names", {str(name): run.trainer(max_epochs=1, precision=name).precision for name in (32, 64, 16, "bf16", "32")})


@case
def gradients_of_bf16_mixed(run: Run) -> None:
    seen = Gradients()
    run.fit(Seen(), run.trainer(max_epochs=1, precision="bf16-mixed", callbacks=[seen]), loaders(run)[0])
    run.note("gradients", seen.seen)


@case
def autocast_of_the_user(run: Run) -> None:
    class Casts(Seen):
        def step(self, batch: Any, name: str) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside, seen = super().step(batch, name)
            with torch.autocast("cpu", enabled=False):
                outside = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log(f"{name}_outside", outside)
            return inside + outside, seen

    in_precision(run, "32-true", model=Casts())


@case
def autocast_left_by_the_user(run: Run) -> None:
    class Leaves(Seen):
        def step(self, batch: Any, name: str) -> Any:
            with torch.autocast("cpu", enabled=False):
                return super().step([batch[0].float(), *batch[1:]], name)

    in_precision(run, "bf16-mixed", model=Leaves())


@case
def a_layer_in_another_dtype(run: Run) -> None:
    class Wide(Seen):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(3, 3, dtype=torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            return {"loss": found["loss"] + self.wide(self.net(batch[0]).double()).square().mean()}

    in_precision(run, "32-true", model=Wide())


@case
def module_cast_by_the_user(run: Run) -> None:
    in_precision(run, "32-true", torch.float64, Seen().double())


class Scaled(pl.LightningModule):
    """With loss scaling that starts low, grows often, and meets a batch that overflows in float16; logs what hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.other = nn.Linear(8, 3)
        self.scales: list[Any] = []

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch) + self.loss(self.other, batch)
        self.log("loss", loss.nan_to_num(-1.0))
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("scaled loss", loss.nan_to_num(-1.0))

    def on_after_backward(self) -> None:
        found = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("scaled gradient", found[0].abs().max().nan_to_num(-1.0))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("gradient", optimizer.param_groups[0]["params"][0].grad.abs().max().nan_to_num(-1.0))

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "epoch.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.scales.append(checkpoint["MixedPrecision"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def with_scaler(run: Run, model: Scaled, **options: Any) -> None:
    x, y = class_data(80)
    x[32:48] = 1e6  # the third batch is inf in float16
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = run.trainer(max_epochs=2, plugins=[plugin], **options)
    run.fit(model, trainer, run.loader(x, y))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, run.loader(x, y))  # goes on with the scale
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "after.ckpt")
    run.finish(model, trainer)
    run.note("scales", [*model.scales, scaler.state_dict()])


@case
def scaled_with_hooks(run: Run) -> None:
    with_scaler(run, Scaled(), gradient_clip_val=0.5, accumulate_grad_batches=2)


@case
def scaled_by_hand(run: Run) -> None:
    class ByHand(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for net, optimizer in ((self.net, first), (self.other, second)):
                self.toggle_optimizer(optimizer)
                loss = self.loss(net, batch)
                self.log(f"loss {len(list(net.parameters()))}", loss.nan_to_num(-1.0))
                self.manual_backward(loss)
                if optimizer is first or batch_idx % 2:  # the second accumulates, over changes of the scale too
                    optimizer.step()
                    optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            first = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            return first, torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9)

    with_scaler(run, ByHand())


@case
def matmul_precision(run: Run) -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        in_precision(run, "32-true")
    finally:
        torch.set_float32_matmul_precision("highest")


if __name__ == "__main__":
    main()
