"""What a step writes to its batch, and to the containers in it."""

from __future__ import annotations

from typing import Any

import torch
from basics import Regression, regression_data
from recording import Run, case
from semantics_models import fit
from torch import Tensor
from torch.utils.data import DataLoader


class Writing(Regression):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept, self.seen = how, torch.zeros(1), list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.how == "view":
            x[:2].add_(1.0)
        elif self.how == "data":
            x.data[0] = 7.0
        elif self.how == "copied":
            x.copy_(y.reshape(len(y), -1)[:, :1].expand_as(x))
        elif self.how == "of the step":
            x.add_(0.01 * self.global_step)
        else:
            x.mul_(0.5)
        if self.how == "stored":
            self.kept = x
        loss = super().training_step((x, y), batch_idx)
        return {"loss": loss, "x": x} if self.how == "returned" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(0.5)
        self.log("val", super().training_step(batch, batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        returned = float(outputs["x"].sum()) if "x" in outputs else None
        self.seen.append([float(batch[0].sum()), float(self.kept.sum()), self.kept is batch[0], returned])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[0].sum()))


class Batches(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """What a step writes to these is there in the next epoch."""

    def __init__(self) -> None:
        self.all = [tuple(part[i : i + 8].clone() for part in regression_data(24)) for i in (0, 8, 16)]

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.all[index]


@case
def batches_written_to_in_place(run: Run) -> None:
    for how in ("all", "view", "data", "copied", "of the step", "stored", "returned"):
        model = Writing(how)
        fit(run, model, n=32, val=True, num_sanity_val_steps=0)
        run.note(how, model.seen)


class Sample:
    """A batch of a class of the user's own."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.sums = x, y, {"none": 0.0}
        self.names = [f"name {index}" for index in range(int(10 * x[0, 0].abs()) % 5 + 1)]


class Annotating(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.x = batch.x * 0.5
        batch.mean, batch.index = batch.x.mean(), batch_idx
        batch.sums["y"] = batch.y.sum()
        batch.names[0] = "first"
        batch.names.append("seen")
        loss = self.loss((batch.x, batch.y))
        self.log("train_loss", loss, batch_size=len(batch.y))  # which nobody finds in an object
        return loss


@case
def batches_that_come_again_as_they_were_left(run: Run) -> None:
    samples = [Sample(x, y) for x, y in Batches().all]
    run.fit(Annotating(), run.trainer(max_epochs=3), DataLoader(samples, batch_size=None))  # pyright: ignore[reportArgumentType]
    sums = [[float(one) for one in (sample.x.sum(), sample.mean, sample.sums["y"])] for sample in samples]  # pyright: ignore[reportAttributeAccessIssue]
    run.note("samples", [sums, [[*sample.names, sample.index] for sample in samples]])  # pyright: ignore[reportAttributeAccessIssue]
    dicts = [as_dict(list(zip(x, y, strict=True))) for x, y in Batches().all]
    run.fit(Rearranging("once"), run.trainer(max_epochs=3), DataLoader(dicts, batch_size=None))  # pyright: ignore[reportArgumentType]
    run.note("dicts", [[sorted(one), {name: float(value.sum()) for name, value in one["in"].items()}] for one in dicts])
    data = Batches()
    run.fit(Writing("all"), run.trainer(max_epochs=3), DataLoader(data, batch_size=None))
    run.note("kept", [float(x.sum()) for x, _ in data.all])


class Rearranging(Regression):
    """Changes the dict that is its batch, and what is in it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["in"]["x"], batch["y"]
        if self.how == "swapped":
            batch["in"]["x"], batch["y"] = y, x
        elif self.how == "popped":
            batch.pop("y")
            del batch["in"]["x"]
        elif self.how == "nested":
            batch["in"]["x"] = x = (x - x.mean()) / x.std()
            batch["more"] = [x.sum(), {"batch": batch_idx, "name": batch["meta"]["name"], "step": 2 * self.global_step}]
            batch["meta"]["name"] = "b"
            batch["list"].append(y)
        elif "done" not in batch:
            batch["done"] = True
            batch["in"]["z"] = batch["in"]["x"] = x = x.mul_(0.5)
        return super().training_step((x, y), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch["x"] = batch["in"].pop("x") * 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(torch.utils._pytree.tree_map_only(Tensor, lambda one: float(one.sum()), batch))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.on_train_batch_end(outputs, batch, batch_idx)


def as_dict(rows: Any) -> dict[str, Any]:
    x, y = torch.utils.data.default_collate(rows)
    return {"in": {"x": x}, "y": y, "list": [x + 1], "meta": {"name": "a"}}


@case
def containers_of_the_batch_that_a_step_changes(run: Run) -> None:
    for how in ("swapped", "popped", "nested", "once"):
        model = Rearranging(how)
        loaders = [run.loader(*regression_data(n), collate_fn=as_dict) for n in (32, 16)]
        run.fit(model, run.trainer(max_epochs=2, num_sanity_val_steps=0), *loaders)
        run.note(how, model.seen)
