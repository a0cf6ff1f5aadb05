"""Trains under `xlatrain launch --elastic`, notes which samples each step had, and ends with its weights: ``elastic.py FOLDER``.

Every third step is saved. Of the first world process 1 is killed at step 5. A world of two takes its time once it has come to
step 9, so that the third is taken in.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_compat as pl
from torch_compat.callbacks import ModelCheckpoint
from xlatrain.cluster import distributed

FOLDER = Path(sys.argv[1])
world = distributed.initialize()
disturbed = "XLATRAIN_ELASTIC" in os.environ
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
        if disturbed and step == 5 and world.process_id == 1 and not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if disturbed and step >= 9 and world.process_count == 2:
            (FOLDER / "may rejoin").touch()
            time.sleep(0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.02)


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
