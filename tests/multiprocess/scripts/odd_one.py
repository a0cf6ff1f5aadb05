"""A run in which one process differs: ``odd_one.py FOLDER WHAT``; prints what ``fit`` raised."""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_compat as pl
from xlatrain.cluster.distributed import initialize

process = initialize().process_id
folder, whats = sys.argv[1], sys.argv[2].split(",")


class Net(pl.LightningModule):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.rate)


def fit(what: str) -> None:
    odd = process == 1
    if what == "variable" and odd:
        os.environ["XLATRAIN_ROLL_LAYERS"] = "17"
    net = Net(3 if odd and what == "layer" else 2, 0.5 if odd and what == "rate" else 0.1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=3, max_epochs=3 if odd and what == "epochs" else 1,
        default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    path = os.path.join(folder, "checkpoints", "elsewhere.ckpt" if odd else "a.ckpt") if what == "checkpoint" else None
    trainer.fit(net, DataLoader(TensorDataset(torch.zeros(8, 4)), 2), ckpt_path=path)


for what in whats:
    try:
        fit(what)
    except Exception as error:
        os.environ.pop("XLATRAIN_ROLL_LAYERS", None)
        print(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
    else:
        print(f"{what}: nothing", flush=True)
