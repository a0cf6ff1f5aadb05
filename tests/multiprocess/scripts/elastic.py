"""Trains under `xlatrain launch --elastic`, notes which samples each step had, and ends with its weights.

``elastic.py FOLDER ROWS EPOCHS [SEED LOSSES]``. Every third step is saved. With a seed so many processes are lost, at random
(:func:`loses_and_takes_in`). Without, this happens in the worlds of a launch of three that keeps every step in memory:

1. Three processes. Process 1 is killed at step 5, and all that was saved is gone.
2. Two. They take their time from step 9 on, so that the third is taken in.
3. Three. Process 1 is killed at step 14, and the keeper of its host before it.
4. Two. Process 0 is killed at step 20, and all keepers before it, when step 18 is committed.
5. One, to the end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_compat as pl
from torch_compat.callbacks import ModelCheckpoint
from xlatrain.checkpoint import is_checkpoint
from xlatrain.cluster import distributed
from xlatrain.cluster.keepers import KeeperConnection, NeighbourMemory

FOLDER, ROWS, EPOCHS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
RANDOM = [int(one) for one in sys.argv[4:]]
world = distributed.initialize()
memory = NeighbourMemory.of_environment()
number = 0 if memory is None else memory.world
lines = (FOLDER / f"{number}.{world.process_id}.jsonl").open("w", buffering=1)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first = torch.nn.Linear(
            4, 8, bias=False
        )  # before BatchNorm a bias has no gradient but rounding, of which Adam makes steps
        self.net = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.net(batch[1]) - batch[1].sum(1, keepdim=True)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: list[torch.Tensor], batch_idx: int) -> None:
        step = self.trainer.global_step
        lines.write(json.dumps([step, batch[0].tolist()]) + "\n")
        if memory is not None and RANDOM:
            loses_and_takes_in(memory, step, *RANDOM)
        elif memory is not None:
            what_happens(memory, step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.02)


def what_happens(memory: NeighbourMemory, step: int) -> None:
    match memory.world, step, world.process_id:
        case 1, 5, 1:
            shutil.rmtree(FOLDER / "saved", ignore_errors=True)
            die([])
        case 2, _, _ if step >= 9:
            (FOLDER / "may rejoin.2").touch()
            time.sleep(0.5)
        case 3, 14, 1:
            die(memory.keepers[:1])
        case 4, 20, 0:
            while not is_checkpoint(FOLDER / "saved" / "epoch=1-step=18.ckpt"):
                time.sleep(0.01)
            die(memory.keepers)


first_step: list[int] = []
losses_before = len(list(FOLDER.glob("lost.*")))


def loses_and_takes_in(memory: NeighbourMemory, step: int, seed: int, losses: int) -> None:
    """Some steps after its start a world loses a process, or its host, or it lets those that are lost come back."""
    first_step[:1] = first_step[:1] or [step]
    of_world = random.Random(f"{seed} {memory.world}")
    at, victim = first_step[0] + of_world.randrange(1, 6), of_world.randrange(world.process_count)
    lost, half = int(os.environ["XLATRAIN_ELASTIC"]) - world.process_count, of_world.random() < 0.5
    host = of_world.random() < 0.3
    if step < at or (losses_before == losses and not lost):
        return
    if lost == 4 or losses_before == losses or (lost and half):
        (FOLDER / f"may rejoin.{memory.world}").touch()
        time.sleep(0.5)
    elif world.process_id == victim and step == at:
        (FOLDER / f"lost.{memory.world}.{'host' if host else 'process'}").touch()
        die(memory.keepers[: int(host)])


def die(keepers: Sequence[str]) -> None:
    for address in keepers:
        with KeeperConnection(address) as keeper:
            os.kill(keeper.parts()[1], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(3)
rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
model = Model()
trainer = pl.Trainer(
    accelerator="cpu", strategy="fsdp", devices=int(os.environ["JAX_NUM_CPU_DEVICES"]),
    num_nodes=int(os.environ.get("XLATRAIN_ELASTIC", 1)),
    max_epochs=EPOCHS, logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=FOLDER,
    callbacks=[ModelCheckpoint(FOLDER / "saved", every_n_train_steps=3, save_top_k=-1)],
)  # fmt: skip
trainer.fit(model, DataLoader(TensorDataset(torch.arange(ROWS), rows), batch_size=2, shuffle=True))
if world.is_main:
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    (FOLDER / "result.json").write_text(json.dumps({"steps": trainer.global_step, "weights": weights}))
