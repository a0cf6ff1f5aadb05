"""Trains under `xlatrain launch --elastic`, notes which samples each step had, and ends with its weights: ``elastic.py FOLDER``.

Every third step is saved, and every step is kept in the hosts' memory. What happens in which world:

1. Three processes. Process 1 is killed at step 5, and all that was saved is gone.
2. Two. They take their time from step 9 on, so that the third is taken in.
3. Three. Process 1 is killed at step 14, and the keeper of its host before it.
4. Two. Process 0 is killed at step 20, and all keepers before it, when step 18 is committed.
5. One, to the end.
"""

from __future__ import annotations

import json
import os
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

FOLDER = Path(sys.argv[1])
world = distributed.initialize()
memory = NeighbourMemory.of_environment()
disturbed = memory is not None
lines = (FOLDER / f"{time.time_ns()}.{world.process_count}.{world.process_id}.jsonl").open("w", buffering=1)


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
        if memory is not None:
            what_happens(memory, step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.02)


def what_happens(memory: NeighbourMemory, step: int) -> None:
    match memory.world, step, world.process_id:
        case 1, 5, 1:
            shutil.rmtree(FOLDER / "saved", ignore_errors=True)
            die([])
        case 2, _, _ if step >= 9:
            (FOLDER / "may rejoin").touch()
            time.sleep(0.5)
        case 3, 14, 1:
            die(memory.keepers[:1])
        case 4, 20, 0:
            while not is_checkpoint(FOLDER / "saved" / "epoch=1-step=18.ckpt"):
                time.sleep(0.01)
            die(memory.keepers)


def die(keepers: Sequence[str]) -> None:
    for address in keepers:
        with KeeperConnection(address) as keeper:
            os.kill(keeper.parts()[1], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if memory is not None and memory.world == 3:
    (FOLDER / "may rejoin").unlink(missing_ok=True)
torch.manual_seed(3)
rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
model = Model()
trainer = pl.Trainer(
    accelerator="cpu", strategy="fsdp", devices=int(os.environ["JAX_NUM_CPU_DEVICES"]), num_nodes=3 if disturbed else 1,
    max_epochs=4, logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=FOLDER,
    callbacks=[ModelCheckpoint(FOLDER / "saved", every_n_train_steps=3, save_top_k=-1)],
)  # fmt: skip
trainer.fit(model, DataLoader(TensorDataset(torch.arange(50), rows), batch_size=2, shuffle=True))
if world.is_main:
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    (FOLDER / "result.json").write_text(json.dumps({"steps": trainer.global_step, "weights": weights}))
