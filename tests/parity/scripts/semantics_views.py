"""Tensors of one memory, and objects at several places: what is written through one is seen through the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from basics import Regression, regression_data
from recording import Run, case
from semantics_batches import Batches
from semantics_models import fit
from torch import Tensor, nn
from torch.utils.data import DataLoader


def sums(*tensors: Tensor) -> list[float]:
    return [float(one.sum()) for one in tensors]


class OfNew(Regression):
    """Stores and returns views of a tensor that it makes, and reads them in the next step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b, self.all, self.seen = how, None, None, list[Any](), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = F.mse_loss(out, batch[1])
        if self.a is not None:
            loss = loss + 0.1 * (self.a.mean() + self.b.mean() * self.layer.bias.sum())
        if self.how == "parts":
            self.a, self.b = out.detach()[:4], out[2:].detach()
        elif self.how == "columns":
            made = out.detach() * 2
            self.all.append({"first": made[:, 0], "second": made.T[1], "both": made})
            self.a, self.b = self.all[-1]["first"], self.all[-1]["both"]
        elif self.how == "one object":
            self.a = self.b = out.detach()
        self.log("train_loss", loss)
        return {"loss": loss, "out": out, "row": out[1], "rest": out.detach()[1:]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["rest"].mul_(0.5)
        self.seen.append(sums(outputs["out"], outputs["row"]))
        if self.a is not None and batch_idx % 2:
            self.a.fill_(0.1 * batch_idx)
            self.seen.append([*sums(self.b), self.a is self.b, [sums(*one.values()) for one in self.all]])


@case
def views_of_a_new_tensor(run: Run) -> None:
    for how in ("parts", "columns", "one object", "returned"):
        model = OfNew(how)
        fit(run, model, n=32)
        run.note(how, model.seen)


class OfBatch(Regression):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.last, self.seen = how, None, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["x"], batch["y"]
        loss = self.loss((x, y))
        if isinstance(self.last, dict):
            loss = loss + 0.1 * self.loss((self.last["x"], self.last["y"]))
        elif self.last is not None:
            loss = loss + 0.1 * self.last.mean() * self.layer.bias.sum()
        if self.how == "column":
            self.last = x[:, 0]
        elif self.how == "the batch":
            batch["out"] = self(x).detach()
            self.last = batch
        elif self.how == "the first" and self.last is None:
            self.last = batch
        self.log("train_loss", loss)
        return {"loss": loss, "batch": batch, "rows": [x[2:4], {"inner": batch}]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows, inner = outputs["rows"]
        self.seen.append([outputs["batch"] is batch, inner["inner"] is batch, self.last is batch, list(batch)])
        (batch["x"] if batch_idx % 2 else rows).mul_(0.5)
        batch["more"] = batch_idx
        self.seen.append([*sums(rows, batch["x"]), *sums(*([self.last] if self.how == "column" else []))])
        if isinstance(self.last, dict):
            self.last["x"].mul_(0.9)
            self.seen.append([*sums(self.last["x"]), self.last["more"]])


def named(rows: Any) -> dict[str, Tensor]:
    return dict(zip("xy", torch.utils.data.default_collate(rows), strict=True))


@case
def views_of_a_batch_and_the_batch_itself(run: Run) -> None:
    for how in ("column", "the batch", "the first", "returned"):
        model = OfBatch(how)
        run.fit(model, run.trainer(max_epochs=2), run.loader(*regression_data(32), collate_fn=named))
        run.note(how, model.seen)


class Noisy(Regression):
    """An autoencoder's batch: its input is its target."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 8), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].add_(0.1)
        self.log("target", batch[1].sum())
        return self.loss((batch[0], batch[1][:, :8]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(sums(*batch))


@case
def one_tensor_twice_in_a_batch(run: Run) -> None:
    batches = [[x, x] for x, _ in Batches().all] + [[x, x.detach()] for x, _ in Batches().all]
    model = Noisy()
    run.fit(model, run.trainer(max_epochs=2), DataLoader(batches, batch_size=None))  # pyright: ignore[reportArgumentType]
    run.note("seen", model.seen)


@case
def views_in_a_batch_that_a_step_writes_to(run: Run) -> None:
    model = Noisy()
    model.layer = nn.Linear(8, 4)
    batches = [[x, x[:, 2:6]] for x, _ in Batches().all]
    run.fit(model, run.trainer(max_epochs=2), DataLoader(batches, batch_size=None))  # pyright: ignore[reportArgumentType]
    run.note("seen", model.seen)


class OfBuffer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(4))
        self.part, self.seen = None, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps[1:].add_(1.0)
        self.part, self.row = self.steps[1:3], self.layer.weight.data[0]
        return {"loss": self.loss(batch), "last": self.steps[-1]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([*sums(self.part, self.row, outputs["last"])])
        self.part.mul_(0.5)
        self.row.mul_(0.99)
        self.seen.append([*sums(self.steps, self.layer.weight)])


@case
def views_of_buffers_and_weights(run: Run) -> None:
    model = OfBuffer()
    fit(run, model, n=32)
    run.note("seen", model.seen)


@case
def a_view_of_a_buffer_read_after_the_buffer_is_written(run: Run) -> None:
    class Late(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(4))
            self.kept = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps.add_(1.0)
            if self.kept is not None:
                self.log("kept", self.kept.sum(), on_epoch=True)
            self.kept = self.steps.detach()
            return super().training_step(batch, batch_idx)

    fit(run, Late(), n=32)


class Averaged(Regression):
    """Assigns a new tensor to a buffer in each step; who holds the old one, keeps it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("low", torch.zeros(1))
        self.how, self.kept, self.last, self.part, self.seen = how, list[Any](), None, None, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        before = self.center
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        self.low, self.high = self.center.abs().chunk(2)
        if self.how == "of the step":
            self.kept.append(self.center)
            self.last, self.part = before, self.center[1:]
        self.log("train_loss", loss := F.mse_loss(out - self.center, batch[1]))
        return {"loss": loss, "center": self.center, "before": before}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "tensors":
            self.kept.append(self.center)
        elif self.how == "arrays":
            self.kept += [self.center.numpy(), self.center.detach()[:1]]
        elif self.how == "now and then" and batch_idx == 1:
            self.kept += [self.center, outputs["center"]]
            self.kept[0][0] = 0.5
        elif self.how == "returned":
            self.kept.append(outputs["before"])
            outputs["center"].mul_(0.5)
        elif self.how == "of the step":
            self.part.fill_(0.1)
            self.seen.append([self.kept[-1] is self.center, *sums(self.last)])
        self.seen.append([*sums(self.center, self.low, self.high, outputs["before"])])

    def on_train_epoch_end(self) -> None:
        self.seen.append(sums(*self.kept))


@case
def buffers_that_a_step_assigns(run: Run) -> None:
    for how in ("tensors", "arrays", "now and then", "returned", "of the step"):
        model = Averaged(how)
        fit(run, model)
        run.note(how, model.seen)


class Written(Regression):
    """Writes in place to a tensor that it made earlier, once it has read it; others have it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.seen, self.others = None, list[Any](), {"all": list[Any]()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch[0])
        if self.mean is None:
            self.mean = out.detach().mean(0)
        loss = F.mse_loss(out, batch[1]) + 0.1 * (self.mean.clone() * self.layer.bias).sum()
        if batch_idx:
            self.mean.lerp_(out.detach().mean(0), 0.1)
        self.others["last"] = self.mean
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        kept = self.others["all"]
        kept.append(self.mean)
        if batch_idx % 2:
            self.seen.append([*sums(*kept), all(one is self.mean for one in kept), self.others["last"] is self.mean])


@case
def written_in_place_later(run: Run) -> None:
    model = Written()
    fit(run, model)
    run.note("seen", model.seen)
