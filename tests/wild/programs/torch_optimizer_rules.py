"""torch-optimizer: Yogi, RAdam, Lookahead around another, and LAMB."""

import lightning.pytorch as pl
import recorder
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch_optimizer import Lamb, Lookahead, RAdam, Yogi


class Regression(pl.LightningModule):
    def __init__(self, make):
        super().__init__()
        self.make = make
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.make(self.parameters())


x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
for make in (
    lambda params: Yogi(params, lr=1e-2),
    lambda params: RAdam(params, lr=1e-2),
    lambda params: Lookahead(Yogi(params, lr=1e-2), k=3),
    lambda params: Lamb(params, lr=1e-2),
):
    recorder.seed()
    recorder.trainer(max_epochs=2).fit(Regression(make), loader)
