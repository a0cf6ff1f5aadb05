"""pytorch-optimizer: SAM in manual optimization, two backward passes a batch."""

import lightning.pytorch as pl
import recorder
import torch
from pytorch_optimizer import SAM
from torch.utils.data import DataLoader, TensorDataset

recorder.seed()


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(self.loss(batch))
        optimizer.second_step(zero_grad=True)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return SAM(self.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9)


x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
recorder.trainer(max_epochs=2).fit(Regression(), loader)
