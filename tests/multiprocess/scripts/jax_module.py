"""A run of a JaxModule whose variables are made in ``configure_model``; it may be killed on the way, and resumed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import optax
import torch
from flax import nnx
from torch.utils.data import DataLoader, TensorDataset

import torch_compat as pl
import xlatrain
from xlatrain.cluster import distributed

distributed.initialize()
DIRECTORY, STATE, HOW = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
SAVED, KILLED, STEPS = 2, 3, 5


class Born(xlatrain.JaxModule):
    def configure_model(self) -> None:
        rngs = nnx.Rngs(3)
        self.inner = nnx.Linear(8, 640, rngs=rngs)
        self.norm = nnx.BatchNorm(640, rngs=rngs)
        self.large = nnx.Linear(640, 640, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(640, 1, rngs=rngs)

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        x = nnx.relu(self.large(self.norm(self.inner(batch[0]))))
        return ((self.outer(self.dropout(x)) - batch[1]) ** 2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        LOSSES.append(float(outputs["loss"]))
        if HOW == "killed" and self.trainer.global_step == SAVED:
            self.trainer.save_checkpoint(STATE)
        if HOW == "killed" and self.trainer.global_step == KILLED:
            os._exit(7)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


LOSSES: list[float] = []
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
trainer = pl.Trainer(
    accelerator="cpu", devices=jax.local_device_count(), num_nodes=jax.process_count(), strategy="fsdp", max_steps=STEPS,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
module = Born()
trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2), ckpt_path=STATE if HOW == "resumed" else None)
kernel = module.large.kernel[...]
found = {
    "losses": LOSSES,
    "statistics": [float(value) for value in jax.device_get(module.norm.mean[...])[:4]],
    "shards": sorted({str(shard.data.shape) for shard in kernel.addressable_shards}),
    "here": kernel.is_fully_addressable,
}
(DIRECTORY / f"{jax.process_index()}.json").write_text(json.dumps(found))
