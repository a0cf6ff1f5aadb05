"""Generated runs under stock Lightning or ``torch_compat``: what is in their checkpoints. ``python FILE FIRST LAST OUTPUT``."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import tempfile
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

MOMENTS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start"),
    *("on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end", "after"),
    *("every_n_train_steps", "train_epochs", "validations", "exception"),
)


def described(value: Any) -> Any:
    """Types of tensors and floats, which differ in their last digits, and all else as it is; paths without their directory."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, dict):
        return {os.path.basename(str(key)): described(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(described, value)]
    if isinstance(value, str):
        return "a directory" if os.path.isdir(value) else os.path.basename(value)
    return value if isinstance(value, int | bool | type(None)) else type(value).__name__


def case(seed: int) -> dict[str, Any]:
    """Settings of a run; seeds go through the moments of saving by turns."""
    r = random.Random(seed)
    c: dict[str, Any] = {
        "seed": seed,
        "moment": MOMENTS[seed % len(MOMENTS)],
        "manual": r.random() < 0.25,
        "batches": r.choice([2, 3, 4, 5]),
        "epochs": r.choice([1, 2, 3]),
        "max_steps": r.choice([-1, -1, -1, 3, 4, 5]),
        "limit": r.choice([1.0, 1.0, 2, 3]),
        "accumulate": r.choice([1, 1, 2, 3]),
        "validates": r.random() < 0.7,
        "val_check_interval": r.choice([1.0, 1.0, 2, 0.5]),
        "every_n_epochs": r.choice([1, 1, 2]),
        "scheduler": r.choice([None, "epoch", "step"]),
        "datamodule": r.random() < 0.4,
        "hparams": r.random() < 0.5,
        "state": r.random() < 0.6,
        "weights_only": r.random() < 0.15,
        "skips": r.random() < 0.1,
    }
    c["optimizers"] = r.choice([1, 2]) if c["manual"] else 1
    if c["manual"]:
        c["accumulate"], c["skips"] = 1, False
    if c["max_steps"] != -1 and r.random() < 0.5:
        c["epochs"] = -1
    run = min(c["batches"], c["limit"]) if isinstance(c["limit"], int) else c["batches"]
    if isinstance(c["val_check_interval"], int):
        c["val_check_interval"] = min(c["val_check_interval"], run)
    kinds = (
        "on_train_batch_start",
        "on_train_batch_end",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_validation_batch_start",
    )
    c["fails"] = (r.choice(kinds), r.choice([0, 0, 1]), r.choice([0, 1])) if c["moment"] == "exception" else None
    return c


def modules_of(pl: Any) -> Any:
    class Data(pl.LightningDataModule):
        def __init__(self, batches: int, validates: bool) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(self.hparams.batches, 2)), 1)

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(torch.ones(2, 2)), 1) if self.hparams.validates else []

        def state_dict(self) -> dict[str, Any]:
            return {"at": 3}

    class Model(pl.LightningModule):
        def __init__(self, c: dict[str, Any]) -> None:
            super().__init__()
            if c["hparams"]:
                self.save_hyperparameters({"width": 2, "names": ["a", "b"]})
            self.a, self.b, self.c = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), c
            self.automatic_optimization = not c["manual"]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.b(self.a(batch[0])).pow(2).mean()
            self.log("loss", loss)
            if self.automatic_optimization:
                return None if self.c["skips"] and batch_idx == 1 else loss
            optimizers = self.optimizers()
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            for one in optimizers:
                one.zero_grad()
            self.manual_backward(loss)
            for one in optimizers:
                one.step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", self.b(self.a(batch[0])).mean())

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.Adam(self.a.parameters()), torch.optim.SGD(self.b.parameters(), lr=0.1)]
            optimizers = optimizers if self.c["optimizers"] == 2 else [torch.optim.Adam(self.parameters())]
            schedulers = [
                {"scheduler": torch.optim.lr_scheduler.StepLR(one, 1), "interval": self.c["scheduler"]}
                for one in (optimizers if self.c["scheduler"] else ())
            ]
            return optimizers, schedulers

    return Model, Data


def callbacks_of(pl: Any) -> Any:
    class Stateful(pl.Callback):
        def __init__(self) -> None:
            self.batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

    class AtMoment(pl.Callback):
        """Saves at one kind of hook; raises at one of its calls."""

        def __init__(self, c: dict[str, Any], root: str) -> None:
            self.c, self.root, self.saved = c, root, 0

        def at(self, hook: str, trainer: Any, batch_idx: int) -> None:
            if trainer.sanity_checking:
                return
            if self.c["fails"] == (hook, trainer.current_epoch, batch_idx):
                raise RuntimeError("as the case says")
            if hook == self.c["moment"]:
                trainer.save_checkpoint(os.path.join(self.root, f"{self.saved:02d}.ckpt"))
                self.saved += 1

    for hook in (*MOMENTS[:9], "on_validation_batch_start"):
        place = {"on_train_batch_start": 3, "on_validation_batch_start": 3}.get(hook, 4)

        def call(self: Any, trainer: Any, *args: Any, _hook: str = hook, _place: int = place) -> None:
            self.at(_hook, trainer, args[_place - 1] if len(args) >= _place else 0)

        setattr(AtMoment, hook, call)
    return Stateful, AtMoment


def run(pl: Any, c: dict[str, Any]) -> dict[str, Any]:
    """The checkpoints of a run: name → keys in order, and content."""
    root = tempfile.mkdtemp()
    (model_class, data_class), (stateful, at_moment) = modules_of(pl), callbacks_of(pl)
    checkpoint = pl.callbacks.ModelCheckpoint
    torch.manual_seed(0)
    module, data = model_class(c), data_class(c["batches"], c["validates"])
    if not c["validates"]:
        module.validation_step = None
    callbacks: list[Any] = [*([stateful()] if c["state"] else []), at_moment(c, root)]
    moment, weights_only = c["moment"], c["weights_only"]
    callbacks += {
        "every_n_train_steps": lambda: [checkpoint(root, every_n_train_steps=2, save_top_k=-1, save_weights_only=weights_only)],
        "train_epochs": lambda: [
            checkpoint(root, save_top_k=-1, save_last=True, save_weights_only=weights_only, save_on_train_epoch_end=True)
        ],
        "validations": lambda: [
            checkpoint(root, save_top_k=-1, monitor="v" if c["validates"] else None, save_weights_only=weights_only)
        ],
        "exception": lambda: [checkpoint(root, save_on_exception=True, every_n_epochs=5)],
    }.get(moment, list)()
    trainer = pl.Trainer(
        max_epochs=c["epochs"], max_steps=c["max_steps"], limit_train_batches=c["limit"], callbacks=callbacks, logger=False,
        accumulate_grad_batches=c["accumulate"], val_check_interval=c["val_check_interval"], accelerator="cpu", devices=1,
        check_val_every_n_epoch=c["every_n_epochs"], num_sanity_val_steps=c["seed"] % 2, default_root_dir=root,
        enable_checkpointing=moment in MOMENTS[10:], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    error = None
    try:
        if c["datamodule"]:
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, data.train_dataloader(), data.val_dataloader() if c["validates"] else None)
    except RuntimeError as raised:
        error = str(raised)
    if moment == "after":
        trainer.save_checkpoint(os.path.join(root, "after.ckpt"), weights_only=weights_only)
    found = {}
    for name in sorted(one for one in os.listdir(root) if one.endswith(".ckpt")):
        content = torch.load(os.path.join(root, name), weights_only=True)
        content.pop("xlatrain", None)
        found[name] = [list(content), described(content)]
    return {"error": error, "files": found}


def contents(pl: Any, first: int, last: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {str(seed): json.loads(json.dumps(run(pl, case(seed)))) for seed in range(first, last)}


if __name__ == "__main__":
    import lightning.pytorch as pl

    logging.disable(logging.WARNING)
    with open(sys.argv[3], "w") as file:
        json.dump(contents(pl, int(sys.argv[1]), int(sys.argv[2])), file)
