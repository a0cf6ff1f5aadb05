"""schedulefree: AdamW without a schedule, its two modes switched around validation."""

import lightning.pytorch as pl
import recorder
import schedulefree
import torch
from torch.utils.data import DataLoader, TensorDataset

recorder.seed()


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def on_train_epoch_start(self):
        self.optimizers().train()

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def on_validation_epoch_start(self):
        self.optimizers().eval()

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val", torch.nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self):
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=1e-2, warmup_steps=3)


x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
recorder.trainer(max_epochs=2, num_sanity_val_steps=0).fit(Regression(), loader, loader)
