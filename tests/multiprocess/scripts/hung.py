"""A fit of which one process comes to a halt: ``hung.py FOLDER PLACE KIND PROCESS`` (:mod:`tests.hostile.hangs`)."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import torch_compat as pl
from torch_compat.callbacks import ModelCheckpoint
from torch_compat.loggers import CSVLogger
from xlatrain.cluster import distributed

FOLDER, PLACE, KIND, PROCESS = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])


def spin() -> None:
    while True:
        pass


HALTS = {
    "sleeps": lambda: time.sleep(10**6),
    "waits for a lock": lambda: threading.Event().wait(),
    "spins": spin,
    "waits in a collective of its own": lambda: distributed.barrier("a place of its own"),
}


def come_to_a_halt(place: str) -> None:
    if place == PLACE and distributed.world().process_id == PROCESS:
        os.write(1, b"halts\n")  # in a captured step a print waits for the step
        HALTS[KIND]()


class Rows(Dataset[torch.Tensor]):
    def __init__(self, place: str) -> None:
        self.place = place

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 4:
            come_to_a_halt(self.place)
        return torch.full((4,), float(index))


def collate(rows: list[torch.Tensor]) -> torch.Tensor:
    come_to_a_halt("collate_fn")
    return torch.stack(rows)


class Logger(CSVLogger):
    def log_metrics(self, *arguments: Any, **named: Any) -> None:
        come_to_a_halt("log_metrics of a logger")
        super().log_metrics(*arguments, **named)


HOOKS = (
    "setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start",
    "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_validation_start", "on_validation_batch_end",
    "on_save_checkpoint", "on_train_end", "training_step", "validation_step",
)  # fmt: skip


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        come_to_a_halt("training_step")
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        come_to_a_halt("validation_step")
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        come_to_a_halt("configure_optimizers")
        return torch.optim.SGD(self.parameters(), 0.01)


def add_hook(name: str) -> None:
    def hook(self: Any, *arguments: Any, **named: Any) -> Any:
        come_to_a_halt(name)
        return getattr(pl.LightningModule, name)(self, *arguments, **named)

    setattr(Model, name, hook)


if PLACE in HOOKS and PLACE not in vars(Model):
    add_hook(PLACE)

distributed.initialize()
trainer = pl.Trainer(
    accelerator="cpu", devices=1, num_nodes=2, max_epochs=2, num_sanity_val_steps=0, log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False, logger=Logger(FOLDER),
    callbacks=[ModelCheckpoint(FOLDER, every_n_train_steps=3)],
)  # fmt: skip
workers = int(PLACE == "a worker of the loader")
trainer.fit(
    Model(),
    DataLoader(Rows(PLACE if workers else "the loader"), batch_size=1, num_workers=workers, collate_fn=collate),
    DataLoader(Rows("the loader for validation"), batch_size=1),
)
print("finished", flush=True)
