"""ema-pytorch: averaged weights beside the model, updated after each batch, used in validation."""

import lightning.pytorch as pl
import recorder
import torch
from ema_pytorch import EMA
from torch.utils.data import DataLoader, TensorDataset

recorder.seed()


class Averaged(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.ema = EMA(self.net, beta=0.99, update_after_step=2, update_every=2)

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def on_train_batch_end(self, *_):
        self.ema.update()

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val", torch.nn.functional.mse_loss(self.ema(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 1e-2)


x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
recorder.trainer(max_epochs=2).fit(Averaged(), loader, loader)
