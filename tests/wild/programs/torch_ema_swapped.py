"""torch-ema: averaged weights that are swapped in for validation."""

import lightning.pytorch as pl
import recorder
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch_ema import ExponentialMovingAverage

recorder.seed()


class Averaged(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.ema = ExponentialMovingAverage(self.net.parameters(), decay=0.95)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def on_before_zero_grad(self, *_):
        self.ema.update(self.net.parameters())

    def on_validation_start(self):
        self.ema.store()
        self.ema.copy_to()

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val", torch.nn.functional.mse_loss(self.net(x), y))

    def on_validation_end(self):
        self.ema.restore()

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 1e-2)


x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
recorder.trainer(max_epochs=2).fit(Averaged(), loader, loader)
