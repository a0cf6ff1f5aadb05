"""A small training run that continues by itself: ``drill.py FOLDER``; prints a digest of the final weights.

DRILL_HANGS_AFTER=n: the loader of process 0 hangs after so many rows. DRILL_HANGS_IN: that of the sanity check does, which a run
that continues has not. DRILL_SERVICE=1: JAX's preemption service has SIGTERM. DRILL_STORAGE=tiered: what is committed is copied
to FOLDER-durable. FOLDER may be in ``gs://bucket``: then the store is where TensorStore expects it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.xlatrain.checkpoint import object_store
from torch_compat import Callback, LightningModule, Trainer
from torch_compat.callbacks import ModelCheckpoint, TieredCheckpoint
from xlatrain.cluster import distributed

FOLDER = sys.argv[1]
OPTIONS = {"every_n_train_steps": 2, "save_last": True}
HANGS_AFTER = int(os.environ.get("DRILL_HANGS_AFTER", "0"))
HANGS_IN = os.environ.get("DRILL_HANGS_IN", "training")


class Rows(TensorDataset):
    read, of = 0, "training"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.read += 1
        if self.of == HANGS_IN and self.read == HANGS_AFTER and distributed.world().is_main:
            print("hangs", flush=True)
            time.sleep(10**6)
        return super().__getitem__(index)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).pow(2).mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Said(Callback):
    """Tells the drill what is going on, so that it can kill at every kind of moment."""

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        print(f"step {trainer.global_step}", flush=True)


if FOLDER.startswith("gs://"):
    object_store.connect(os.environ["TENSORSTORE_GCS_HTTP_URL"], elsewhere=True)
saves = ModelCheckpoint(FOLDER, **OPTIONS)
if os.environ.get("DRILL_STORAGE") == "tiered":
    saves = TieredCheckpoint(FOLDER, durable_dirpath=f"{FOLDER}-durable", **OPTIONS)
distributed.initialize(preemption_service="DRILL_SERVICE" in os.environ)
torch.manual_seed(5)
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
loader = DataLoader(Rows(x, x.sum(1, keepdim=True)), 2, shuffle=True)
checked = Rows(x, x.sum(1, keepdim=True))
checked.of = "sanity check"
module = Model()
trainer = Trainer(
    accelerator="cpu", strategy="fsdp", max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
    check_val_every_n_epoch=100,
    callbacks=[saves, Said()],
)  # fmt: skip
trainer.fit(module, loader, DataLoader(checked, 2) if checked.of == HANGS_IN else None, ckpt_path="auto")
digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in module.state_dict().values())).hexdigest()
print(f"finished {trainer.global_step} {digest}", flush=True)
