"""Outputs of data loaders: streams, combined loaders, texts, objects, nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from basics import Regression, regression_data
from lightning.pytorch.utilities import CombinedLoader
from recording import Run, case
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanAbsoluteError


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, n: int) -> None:
        self.rows = list(zip(*regression_data(n), strict=True))

    def __iter__(self) -> Any:
        return iter(self.rows)


@case
def iterable_dataset(run: Run) -> None:
    train, val = DataLoader(Stream(56), batch_size=run.batch_size), DataLoader(Stream(24), batch_size=run.batch_size)
    run.fit(Regression(), run.trainer(max_epochs=2), train, val)


@case
def combined_loaders(run: Run) -> None:
    class Combined(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"]) + 0.5 * self.loss(batch["b"])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            a, b = batch
            self.log("val_both", self.loss(a) + self.loss(b))

    train = CombinedLoader(
        {"a": run.loader(*regression_data(64), shuffle=True), "b": run.loader(*regression_data(32, 1), shuffle=True)}, "min_size"
    )
    val = CombinedLoader([run.loader(*regression_data(32, 2)), run.loader(*regression_data(48, 3))], "max_size_cycle")
    run.fit(Combined(), run.trainer(max_epochs=2), train, val)


@case
def batches_with_texts(run: Run) -> None:
    class Texts(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.mse_loss(self(batch["x"]), batch["y"])
            return {"loss": loss, "ids": batch["id"]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            ids.append([list(outputs["ids"]), list(batch["id"])])

    ids: list[Any] = []
    x, y = regression_data(32)
    rows = [{"x": x[i], "y": y[i], "id": f"row {i}"} for i in range(32)]
    run.fit(Texts(), run.trainer(max_epochs=2), DataLoader(rows, batch_size=run.batch_size))
    run.note("ids", ids)


@case
def texts_that_are_read(run: Run) -> None:
    class Texts(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.firsts: list[Any] = []
            self.weights = {"easy": 1.0, "hard": 3.0}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.mse_loss(self(batch["x"]), batch["y"])
            self.names.extend(batch["name"])
            self.firsts.append(batch["name"][0])
            if batch["task"][0] == "hard":
                loss = loss * 2
            self.log(f"loss_{batch['task'][1]}", loss)
            return loss * self.weights[batch["task"][-1]] * (1 + len(batch["name"]) / 100)

    x, y = regression_data()
    rows = [{"x": x[i], "y": y[i], "name": f"row {i}", "task": "hard" if (i // 16) % 2 else "easy"} for i in range(len(x))]
    model = Texts()
    run.fit(model, run.trainer(max_epochs=2), DataLoader(rows, batch_size=run.batch_size))
    run.note("names", model.names)
    run.note("firsts", model.firsts)


class Texted:
    """A batch of the user's own class."""

    def __init__(self, rows: list[Any]) -> None:
        self.x, self.y = (torch.stack([row[i] for row in rows]) for i in range(2))
        self.names = [row[2] for row in rows]
        self.weight = "0.5" if "4" in self.names[0] else "1.5"
        self.unused = self.names[-1]


@case
def texts_of_batch_objects(run: Run) -> None:
    class Model(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.losses: dict[str, list[Tensor]] = defaultdict(list)
            self.settings: dict[str, Any] = {}
            self.error = MeanAbsoluteError()
            self.error.scale = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch, where = batch
            prediction = self(batch.x)
            loss = F.mse_loss(prediction, batch.y) * float(batch.weight) * float(where["factor"]) * self.error.scale
            self.names.extend(batch.names)
            self.losses["train"].append(loss.detach())
            self.settings["rows"] = len(batch.names)  # the same entry each time
            if "once" not in self.settings:
                self.settings["once"] = "by the step"
            self.error(prediction, batch.y)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.settings["once"] = "by a hook"
            seen.append(dict(self.settings))
            self.error.scale = 0.5 if batch_idx == 1 else 1.0

    def collate(rows: list[Any]) -> Any:
        texts = Texted(rows)
        return texts, {"factor": "2.0" if "3" in texts.names[0] else "1.0", "unused": texts.names[0], "x": texts.x}

    seen: list[Any] = []
    x, y = regression_data()
    rows = [(x[i], y[i], f"row {i}") for i in range(len(x))]
    model = Model()
    run.fit(model, run.trainer(max_epochs=2), DataLoader(rows, batch_size=run.batch_size, collate_fn=collate))  # pyright: ignore[reportArgumentType]
    run.note("kept", [model.names, model.losses["train"], seen, model.error.compute()])


@case
def empty_dataset(run: Run) -> None:
    run.fit(Regression(), run.trainer(max_epochs=2), DataLoader([], batch_size=run.batch_size))


@case
def tensors_in_another_order_of_memory(run: Run) -> None:
    """Parameters, buffers, batches, results and gradients that are not contiguous, and what their strides decide."""

    class Turned(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t() / 6)
            self.register_buffer("kept", torch.arange(6.0).view(2, 3).t())
            self.register_buffer("laid", torch.arange(6.0).view(2, 3))
            self.strides: list[Any] = []

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return x.t().contiguous().t(), y

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _ = batch
            run.note("batch", [x.stride(0) == 1, x.is_contiguous()])
            by_memory = self.turned.as_strided((2,), (1,)).square().sum() + x.as_strided((2,), (1,)).mean()
            flat = self.kept.reshape(-1)  # a copy here, a view of one that is contiguous
            flat.add_(1)
            self.kept.as_strided((2,), (1,)).mul_(0.5)
            self.laid = (self.laid.contiguous() + 1).t().contiguous().t()
            order = 1 + self.laid.stride(0) + self.turned.stride(0)
            return {"loss": self.loss(batch) + by_memory * order, "turned": self.turned.detach() * self.kept}

        def on_after_backward(self) -> None:
            assert self.turned.grad is not None
            self.strides.append([list(self.turned.grad.stride()), self.turned.grad.is_contiguous()])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            turned = outputs["turned"]
            before = list(turned.stride())  # before a value is read
            self.strides.append([before, turned.as_strided((2,), (1,)).tolist(), list(turned.stride())])
            self.strides.append([list(self.laid.stride()), list(self.kept.stride()), list(self.turned.stride())])

    model = Turned()
    run.fit(model, run.trainer(max_epochs=2), run.loader(*regression_data(64)))
    run.note("strides", model.strides)
