"""A run with parameters split over two processes ends with an error on process 1, or on both: ``failing.py FOLDER one|all``."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_compat as pl
from xlatrain.cluster.distributed import initialize

process = initialize().process_id
folder, who = sys.argv[1:]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, _):
        return self.layer(batch[0]).sum()

    def on_train_batch_end(self, *_):
        if self.global_step == 2 and (who == "all" or process == 1):
            raise KeyError("an error of the user's own")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


pl.seed_everything(0)
net = Net()
trainer = pl.Trainer(
    accelerator="cpu", devices=1, num_nodes=2, max_epochs=1, strategy="fsdp", default_root_dir=folder,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
try:
    trainer.fit(net, DataLoader(TensorDataset(torch.ones(16, 4)), 2))
except KeyError as error:
    if who == "one":
        raise
    print(f"after {error}: {net.layer.weight.detach().unique().tolist()}", flush=True)
