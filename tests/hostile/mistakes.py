"""Mistakes in users' scripts, each in a run of its own: ``python mistakes.py PACKAGE`` prints what each raised, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

pl: Any = importlib.import_module(sys.argv[1])

Mistake = Callable[[Any], None]
STEPS: dict[str, Callable[[Any, Any, int], Any]] = {}
SETUPS: dict[str, Mistake] = {}


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.table = nn.Embedding(5, 4)
        self.step: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx) if self.step else F.cross_entropy(self.net(batch["x"]), batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step(mistake: Callable[[Any, Any, int], Any]) -> None:
    STEPS[mistake.__name__] = mistake


def setup(mistake: Mistake) -> None:
    SETUPS[mistake.__name__] = mistake


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model.net(batch["x"]), batch["y"])


@step
def typo_of_a_layer(model: Any, batch: Any, batch_idx: int) -> Any:
    return model.nett(batch["x"]).sum()


@step
def typo_of_a_method(model: Any, batch: Any, batch_idx: int) -> Any:
    return loss(model, batch).meen()  # pyright: ignore[reportAttributeAccessIssue]


@step
def undefined_name(model: Any, batch: Any, batch_idx: int) -> Any:
    return loss(model, batc)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


@step
def missing_key(model: Any, batch: Any, batch_idx: int) -> Any:
    return model.net(batch["image"]).sum()


@step
def batch_as_a_tuple(model: Any, batch: Any, batch_idx: int) -> Any:
    x, y, _ = batch
    return F.cross_entropy(model.net(x), y)


@step
def wrong_width(model: Any, batch: Any, batch_idx: int) -> Any:
    return model.net(batch["x"][:, :3]).sum()


@step
def wrong_sum(model: Any, batch: Any, batch_idx: int) -> Any:
    return (model.net(batch["x"]) + torch.ones(5)).sum()


@step
def wrong_matmul(model: Any, batch: Any, batch_idx: int) -> Any:
    return (model.net(batch["x"]) @ batch["x"]).sum()


@step
def wrong_view(model: Any, batch: Any, batch_idx: int) -> Any:
    return model.net(batch["x"]).view(-1, 7).sum()


@step
def wrong_cat(model: Any, batch: Any, batch_idx: int) -> Any:
    return torch.cat([model.net(batch["x"]), batch["x"]], dim=0).sum()


@step
def wrong_dim(model: Any, batch: Any, batch_idx: int) -> Any:
    return model.net(batch["x"]).sum(dim=3).mean()


@step
def wrong_dtype(model: Any, batch: Any, batch_idx: int) -> Any:
    return model.net(batch["x"].double()).sum()


@step
def float_tokens(model: Any, batch: Any, batch_idx: int) -> Any:
    return model.table(batch["x"]).sum()


@step
def float_labels(model: Any, batch: Any, batch_idx: int) -> Any:
    return F.nll_loss(model.net(batch["x"]), batch["y"].float())


@step
def too_few_labels(model: Any, batch: Any, batch_idx: int) -> Any:
    return F.cross_entropy(model.net(batch["x"]), batch["y"][:2])


@step
def loss_of_many(model: Any, batch: Any, batch_idx: int) -> Any:
    return model.net(batch["x"]).sum(dim=1)


@step
def loss_detached(model: Any, batch: Any, batch_idx: int) -> Any:
    return loss(model, batch).detach()


@step
def loss_without_key(model: Any, batch: Any, batch_idx: int) -> Any:
    return {"los": loss(model, batch)}


@step
def written_in_place(model: Any, batch: Any, batch_idx: int) -> Any:
    h = torch.exp(model.net(batch["x"]))
    h2 = h * 2
    h += 1
    return h2.sum() + h.sum()


@step
def parameter_written(model: Any, batch: Any, batch_idx: int) -> Any:
    model.net[0].weight += 1
    return loss(model, batch)


@step
def own_error(model: Any, batch: Any, batch_idx: int) -> Any:
    raise ValueError("the batch is odd")


@step
def own_chain(model: Any, batch: Any, batch_idx: int) -> Any:
    try:
        return model.net(batch["labels"])
    except KeyError as error:
        raise LookupError("no labels") from error


@step
def log_of_many(model: Any, batch: Any, batch_idx: int) -> Any:
    value = loss(model, batch)
    model.log("outputs", model.net(batch["x"]))
    return value


@step
def deep_in_calls(model: Any, batch: Any, batch_idx: int) -> Any:
    def inner(x: Tensor) -> Tensor:
        return model.net(x.flatten())

    def outer(x: Tensor) -> Tensor:
        return inner(x).sum()

    return outer(batch["x"])


@step
def wrong_argument(model: Any, batch: Any, batch_idx: int) -> Any:
    return F.cross_entropy(model.net(batch["x"]), batch["y"], reduce_mode="mean")  # pyright: ignore[reportCallIssue]


@setup
def wrong_optimizer_argument(model: Any) -> None:
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), learning_rate=0.1)  # pyright: ignore[reportCallIssue]


@setup
def negative_rate(model: Any) -> None:
    model.configure_optimizers = lambda: torch.optim.Adam(model.parameters(), lr=-1)


@setup
def no_parameters(model: Any) -> None:
    model.configure_optimizers = lambda: torch.optim.SGD([], lr=0.1)


@setup
def scheduler_without_optimizer(model: Any) -> None:
    model.configure_optimizers = lambda: torch.optim.lr_scheduler.StepLR(None, 1)  # pyright: ignore[reportArgumentType]


def error_of(model: Any) -> BaseException | None:
    rows = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "y": i % 3} for i in range(8)]
    quiet: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, num_sanity_val_steps=0, **quiet)
    try:
        trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))  # pyright: ignore[reportArgumentType]
    except Exception as error:
        return error
    return None


def main() -> None:
    warnings.simplefilter("ignore")
    found = {}
    for name in (*STEPS, *SETUPS):
        model = Model()
        model.step = STEPS.get(name)
        if name in SETUPS:
            SETUPS[name](model)
        error = error_of(model)
        lines = "" if error is None else "".join(traceback.format_exception(error))
        classes = [kind.__name__ for kind in type(error).__mro__]
        code = (STEPS.get(name) or SETUPS[name]).__code__
        at = sorted({line for *_, line in code.co_lines() if line})
        at += range(at[0], at[-1] + 8) if name == "deep_in_calls" else []
        text = lines.splitlines()
        found[name] = {"type": classes[0], "classes": classes, "message": str(error), "traceback": text, "at": at}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
