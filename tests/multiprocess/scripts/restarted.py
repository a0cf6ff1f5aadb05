"""Trains; process 1 of the first start fails in the third of four epochs. Says what it began with and ended with.

Then the same once more from the beginning, undisturbed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        (x,) = batch
        return self.layer(x).square().mean()

    def on_train_epoch_start(self) -> None:
        print("epoch", self.current_epoch)
        if self.current_epoch == 2 and not marker.exists():
            self.trainer.strategy.barrier()
            if self.trainer.global_rank == 1:
                marker.touch()
                sys.exit(7)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


marker = Path(sys.argv[1]) / "failed"
data = DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64), batch_size=4, shuffle=True)
options = {"accelerator": "cpu", "devices": 1, "num_nodes": int(os.environ.get("XLATRAIN_PROCESSES", "1")), "logger": False}
quiet = {"enable_progress_bar": False, "enable_model_summary": False}
for name in ("disturbed", "undisturbed"):
    folder = Path(sys.argv[1]) / name
    pl.seed_everything(1)
    warm = pl.Trainer(max_epochs=1, default_root_dir=folder, **options, **quiet)
    model = Model()
    warm.fit(model, data)
    saved = pl.callbacks.ModelCheckpoint(folder / "second", save_top_k=-1)
    trainer = pl.Trainer(max_epochs=4, callbacks=[saved], default_root_dir=folder, **options, **quiet)
    trainer.fit(model, data)
    print("ended", trainer.global_step, [round(value, 6) for value in model.layer.weight.flatten().tolist()])
